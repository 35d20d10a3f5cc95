"""A listening port. ``find_place`` may wait for a name service: in the caller's thread; the rest does not."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from llm_datadist._link.dialer import Candidate, SockAddr, numeric, prepare_socket, resolve
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.seam import Address
from llm_datadist._logs import get_logger
from llm_datadist.status import LLMException, LLMStatusCode

BACKLOG = 512  # peers that dial while this process is held up; the system may cap it
ACCEPTS_PER_TURN = 64
PAUSE_S = 0.1  # when descriptors have run out: the connection waits in the backlog meanwhile

_log = get_logger("llm_datadist.link")


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen: an address and what its host stands for."""

    address: Address
    candidates: tuple[Candidate, ...]


def find_place(address: Address) -> Place:
    """Looks the host up, if it is a name; "" is all IPv4 interfaces, "::" both families.

    Raises:
        LLMException: LLM_FAILED, with the address and the system's reason.
    """
    try:
        candidates = resolve(Address(address.host or "0.0.0.0", address.port), passive=True)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(address, error) from error
    return Place(address, tuple(sorted(candidates, key=lambda candidate: candidate[0] != socket.AF_INET)))


def bind(place: Place) -> socket.socket:
    """A listening socket, non-blocking, at the first of the addresses that can be bound, IPv4 first.

    Raises:
        LLMException: LLM_FAILED, with the address and the system's reason.
    """
    failure: OSError | None = None
    for family, sockaddr in place.candidates:
        try:
            return _listen(family, sockaddr)
        except OSError as error:
            failure = failure or error
    raise _cannot_listen(place.address, failure) from failure


def _cannot_listen(address: Address, error: Exception | None) -> LLMException:
    reason = getattr(error, "strerror", None) or error or "it has no address"
    return LLMException(
        f"cannot listen on {address}: {reason}; choose a local address and a free port (0 = any)",
        status_code=LLMStatusCode.LLM_FAILED,
    )


def _listen(family: int, sockaddr: SockAddr) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart binds at once
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(sockaddr)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """Accepts connections on a bound socket."""

    def __init__(
        self, loop: ControlLoop, sock: socket.socket, on_accept: Callable[[socket.socket, str], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_accept = on_accept
        self._warned = False
        self.address = numeric(sock.getsockname())

    def open(self) -> None:
        """Begins to accept."""
        if self._sock.fileno() >= 0:
            self._loop.register(self._sock, selectors.EVENT_READ, self._on_ready)

    def _on_ready(self, events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # gone before it was accepted
            except OSError as error:
                self._pause(error)
                return
            try:
                prepare_socket(sock)
            except OSError:
                sock.close()
                continue
            self._on_accept(sock, str(numeric(peer)))

    def _pause(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("cannot accept on %s: %s; trying on", self.address, error.strerror or error)
        self._loop.unregister(self._sock)
        self._loop.call_at(time.monotonic() + PAUSE_S, self.open)

    def close(self) -> None:
        """Ends listening; connections not accepted yet are refused by the system. Idempotent."""
        self._loop.unregister(self._sock)
        self._sock.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptor."""
        self._sock.close()
