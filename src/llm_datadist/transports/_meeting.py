"""Where the processes of one host meet: an abstract UNIX socket, on which the kernel names the other end.

Strategy: ``connect`` does not wait for the accept, so a stopped owner delays nobody. Abstract names follow
the network namespace, and no file system holds them.
Threads: the listener's callback runs on the control thread and never blocks.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from llm_datadist._accepting import ACCEPTS_PER_TURN, Accepting
from llm_datadist._shortages import reason_of
from llm_datadist.transports.seam import TransportUnavailable

# The callback says for how many seconds the socket shall be left alone then; 0 or None: not at all.
AdoptReader = Callable[[socket.socket, Callable[[], float | None]], None]
DropReader = Callable[[socket.socket], None]

_CREDENTIALS = struct.Struct("iII")
_ALL_USERS = (1 << 32) - 1  # of the first user namespace


class Meeting:
    """A place to be met at.

    Args:
        prefix: How its name begins; a random rest follows.
        kind: SOCK_STREAM or SOCK_SEQPACKET.
        random_bytes: Source of secrets, as ``secrets.token_bytes``.
        welcome: Takes over each accepted socket, on the control thread.
        refuse: Tells one why it is not taken.
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
        refuse: Callable[[socket.socket, str], None],
        adopt_reader: AdoptReader,
        drop_reader: DropReader,
    ) -> None:
        self.name = prefix + random_bytes(12).hex().encode()
        self._drop_reader = drop_reader
        with contextlib.ExitStack() as undo:
            self._listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
            undo.callback(self._listener.close)
            self._listener.bind(self.name)
            self._listener.listen(socket.SOMAXCONN)
            where = self.name[1:].decode()
            self._accepting = Accepting(self._listener, where, lambda sock, _: welcome(sock), refuse)
            undo.callback(self._accepting.close)
            adopt_reader(self._listener, self.accept)
            undo.pop_all()

    def close(self) -> None:
        """Ends it."""
        self._drop_reader(self._listener)
        end(self._listener)
        self.close_after_fork()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptors and no more. Idempotent."""
        self._listener.close()
        self._accepting.close()

    def accept(self, most: int = ACCEPTS_PER_TURN) -> float:
        """Takes those that have connected; for how long the listener must be left alone then, in seconds."""
        return self._accepting.run(most)


def meet(name: bytes, kind: int) -> socket.socket:
    """A non-blocking connection to whoever listens at ``name``. Never waits.

    Raises:
        TransportUnavailable: Nobody can be met there; the text says why.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    except OSError as exc:
        raise TransportUnavailable(f"no local socket can be opened: {reason_of(exc)}") from exc
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

    The pid is 0 across pid namespaces. For one that has listened they are those of that moment. See
    ``stands_for_many`` for the user.
    """
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def stands_for_many(uid: int) -> bool:
    """Whether the kernel names every user so whom this user namespace does not know; mostly 65534, nobody."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        known = Path("/proc/self/uid_map").read_text()
    except OSError:  # no /proc: it may be
        overflow, known = 65534, ""
    return uid == overflow and sum(int(line.split()[2]) for line in known.splitlines()) < _ALL_USERS
