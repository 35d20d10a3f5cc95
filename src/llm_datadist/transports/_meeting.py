"""Where the processes of one host meet: an abstract UNIX socket, on which the kernel names the other end.

Strategy: ``connect`` does not wait for the accept, so a stopped owner delays nobody. Abstract names follow
the network namespace, and no file system holds them.
Threads: the listener's callback runs on the control thread and never blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable

from llm_datadist.transports.seam import TransportUnavailable

AdoptReader = Callable[[socket.socket, Callable[[], None]], None]
DropReader = Callable[[socket.socket], None]

_ACCEPTS_PER_TURN = 64  # then the control thread looks after others; the listener stays readable
_CREDENTIALS = struct.Struct("iII")


class Meeting:
    """A place to be met at.

    Args:
        prefix: How its name begins; a random rest follows.
        kind: SOCK_STREAM or SOCK_SEQPACKET.
        random_bytes: Source of secrets, as ``secrets.token_bytes``.
        welcome: Takes over each accepted socket, on the control thread.
        adopt_reader: Registers a socket and a callback for "readable" with the control loop.
        drop_reader: Takes the socket out again.

    Attributes:
        name: Where it is.
    """

    def __init__(
        self,
        prefix: bytes,
        kind: int,
        random_bytes: Callable[[int], bytes],
        welcome: Callable[[socket.socket], None],
        adopt_reader: AdoptReader,
        drop_reader: DropReader,
    ) -> None:
        self.name = prefix + random_bytes(12).hex().encode()
        self._welcome = welcome
        self._drop_reader = drop_reader
        self._listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._listener.bind(self.name)
            self._listener.listen(socket.SOMAXCONN)
            adopt_reader(self._listener, self.accept)
        except BaseException:
            self.close_after_fork()
            raise

    def close(self) -> None:
        """Ends it."""
        self._drop_reader(self._listener)
        end(self._listener)
        self.close_after_fork()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptors and no more. Idempotent."""
        self._listener.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def accept(self) -> None:
        """Takes those that have connected."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE) and self._spare_fd >= 0:
                    self._accept_without_descriptors()
                return
            self._welcome(sock)

    def _accept_without_descriptors(self) -> None:
        """Takes one connection with the spare descriptor: left in the queue it would wake us for ever."""
        os.close(self._spare_fd)
        self._spare_fd = -1
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def meet(name: bytes, kind: int) -> socket.socket:
    """A non-blocking connection to whoever listens at ``name``. Never waits.

    Raises:
        TransportUnavailable: Nobody can be met there; the text says why.
    """
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        sock.connect(name)
    except BlockingIOError as exc:
        sock.close()
        raise TransportUnavailable("the peer's queue of local connections is full; try again") from exc
    except OSError as exc:
        sock.close()
        raise TransportUnavailable(
            f"the peer cannot be met on this host ({exc}): another host or another network namespace"
        ) from exc
    return sock


def end(sock: socket.socket) -> None:
    """Closes a socket for everybody now, also where a child has inherited it or a thread waits on it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Pid and effective user id of the other end, as seen from here, by the kernel's word.

    The pid is 0 across pid namespaces. For one that has listened they are those of that moment.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid
