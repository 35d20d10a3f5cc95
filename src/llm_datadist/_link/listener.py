"""A listening port. ``find_place`` may wait for a name service: in the caller's thread; the rest does not."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_datadist._accepting import Accepting
from llm_datadist._core import limits
from llm_datadist._link.dialer import Candidate, SockAddr, numeric, prepare_socket, resolve
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.seam import Address
from llm_datadist._shortages import is_shortage, reason_of
from llm_datadist._wire.framing import Decoder, ProtocolError, encode
from llm_datadist._wire.messages import DataHello, Hello, Refused
from llm_datadist.status import LLMException, LLMStatusCode


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
        raise cannot_listen(address, error) from error
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
            if is_shortage(error):
                break
    raise cannot_listen(place.address, failure) from failure


def cannot_listen(address: Address, error: Exception | None) -> LLMException:
    """The exception for a port that is not to be had."""
    reason = "it has no address" if error is None else reason_of(error)
    if error is None or not is_shortage(error):
        reason += "; choose a local address and a free port (0 = any)"
    return LLMException(f"cannot listen on {address}: {reason}", status_code=LLMStatusCode.LLM_FAILED)


def _listen(family: int, sockaddr: SockAddr) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart binds at once
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(sockaddr)
        sock.listen(limits.BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Listener:
    """Accepts connections on a bound socket, which it takes over.

    Raises:
        OSError: There is no descriptor to spare.
    """

    def __init__(
        self,
        loop: ControlLoop,
        sock: socket.socket,
        on_accept: Callable[[socket.socket, str], float],
        refuse_data: Callable[[socket.socket, DataHello, str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_accept = on_accept
        self._refuse_data = refuse_data
        self.address = numeric(sock.getsockname())
        self._accepting = Accepting(sock, str(self.address), self._take, self._refuse)

    def open(self) -> None:
        """Begins to accept.

        Raises:
            OSError: The system cannot watch another socket.
        """
        self._loop.register(self._sock, selectors.EVENT_READ, self._on_ready)

    def _on_ready(self, events: int) -> None:
        pause_s = self._accepting.run()
        if pause_s:
            self._loop.rest(self._sock, pause_s)

    def _take(self, sock: socket.socket, peer: Any) -> float:
        try:
            prepare_socket(sock)
            address = str(numeric(peer))
        except OSError:  # reset already
            sock.close()
            return 0.0
        return self._on_accept(sock, address)

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        """Answers whoever has said what the connection is for."""
        sock.setblocking(False)
        decoder = Decoder()
        decoder.push(sock.recv(limits.HANDSHAKE_FRAME_NBYTES))
        try:
            frame = decoder.take()
        except ProtocolError:
            return
        match frame and frame.message:
            case Hello():
                text = f"it cannot take another connection: {reason}"
                sock.send(b"".join(encode(Refused(code=LLMStatusCode.LLM_LINK_FAILED, text=text))))
            case DataHello() as hello:
                self._refuse_data(sock, hello, reason)

    def close(self) -> None:
        """Ends listening; connections not accepted yet are refused by the system. Idempotent."""
        self._loop.unregister(self._sock)
        self.close_after_fork()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptors."""
        self._sock.close()
        self._accepting.close()
