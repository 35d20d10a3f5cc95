"""Making TCP connections without blocking: names are resolved on threads of their own, one per name.

Addresses of a name are tried one after the other. Control thread only, apart from the resolver threads,
which only hand their result over.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - getaddrinfo loads it, and Python never again if there is no descriptor then
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from llm_datadist._link.loop import ControlLoop, TimerHandle
from llm_datadist._link.seam import Address
from llm_datadist._shortages import hint_of, reason_of, start_thread
from llm_datadist.status import OutOfMemoryError

NEXT_ADDRESS_S = 1.0  # after which the next address of a name is tried; the last one has all the time left

SockAddr: TypeAlias = tuple[Any, ...]
Candidate: TypeAlias = tuple[int, SockAddr]
Done: TypeAlias = Callable[[socket.socket | None, str], None]


def prepare_socket(sock: socket.socket) -> None:
    """What every connection through the listening port wants, control and data."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def numeric(sockaddr: SockAddr) -> Address:
    """A socket address as host and port, with the scope of a link-local one."""
    host, port = socket.getnameinfo(sockaddr, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]  # IPv4 through a listener of both families
    return Address(host, int(port))


def resolve(address: Address, *, passive: bool = False, literal: bool = False) -> list[Candidate]:
    """Addresses of a host. ``literal``: only if no name service is needed.

    Raises:
        OSError: It has none.
    """
    flags = (socket.AI_PASSIVE if passive else 0) | (socket.AI_NUMERICHOST if literal else 0)
    found = socket.getaddrinfo(address.host or None, address.port, 0, socket.SOCK_STREAM, 0, flags)
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


class Connector:
    """One attempt to connect. ``done(socket or None, reason)`` is called once, unless cancelled."""

    def __init__(self, loop: ControlLoop, address: Address, done: Done) -> None:
        self._loop = loop
        self._address = address
        self._done: Done | None = done
        self._candidates: list[Candidate] = []
        self._sock: socket.socket | None = None
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Begins; ``done`` may be called at once."""
        try:
            found = resolve(self._address, literal=True)
        except (OSError, UnicodeError):
            try:
                start_thread(self._resolve, "llm-datadist-resolve")
            except OutOfMemoryError as error:
                self._finish(None, f"cannot resolve {self._address.host!r}: {error}")
            return
        self._on_resolved(found, "")

    def cancel(self) -> None:
        """Ends the attempt silently. Idempotent."""
        self._done = None
        self._drop()

    def _resolve(self) -> None:
        try:
            found, reason = resolve(self._address), ""
        except (OSError, UnicodeError) as error:
            found, reason = [], f"cannot resolve {self._address.host!r}: {reason_of(error)}"
        self._loop.call_soon(lambda: self._on_resolved(found, reason))

    def _on_resolved(self, candidates: list[Candidate], reason: str) -> None:
        self._candidates = candidates
        self._next(reason)

    def _next(self, reason: str) -> None:
        while self._done is not None and self._candidates:
            family, sockaddr = self._candidates.pop(0)
            code = self._try(family, sockaddr)
            if code == 0:
                return
            reason = _why(sockaddr, code)
        self._finish(None, reason)

    def _try(self, family: int, sockaddr: SockAddr) -> int:
        try:
            self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            prepare_socket(self._sock)
            code = self._sock.connect_ex(sockaddr)
            if code in (0, errno.EINPROGRESS):
                watched = selectors.EVENT_WRITE
                self._loop.register(self._sock, watched, lambda events: self._on_ready(sockaddr))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            self._drop()
            return code
        if self._candidates:
            self._timer = self._loop.call_at(
                time.monotonic() + NEXT_ADDRESS_S, lambda: self._failed(f"{numeric(sockaddr)}: no answer")
            )
        return 0

    def _on_ready(self, sockaddr: SockAddr) -> None:
        sock = self._sock
        if sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and _is_own_echo(sock):
            code = errno.ECONNREFUSED
        if code:
            self._failed(_why(sockaddr, code))
            return
        self._loop.unregister(sock)
        self._sock = None
        self._drop()
        self._finish(sock, "")

    def _failed(self, reason: str) -> None:
        self._drop()
        self._next(reason)

    def _finish(self, sock: socket.socket | None, reason: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(sock, reason)

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sock is not None:
            self._loop.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptor."""
        if self._sock is not None:
            self._sock.close()


def _why(sockaddr: SockAddr, code: int) -> str:
    """Why an address cannot be reached, and what to do if that is in the caller's hands."""
    hint = hint_of(code)
    if code == errno.ECONNREFUSED:
        hint = "nobody listens there: check address and port, or start the peer first"
    return f"{numeric(sockaddr)}: {os.strerror(code)}{hint and '; '}{hint}"


def _is_own_echo(sock: socket.socket) -> bool:
    """TCP connects a socket to itself when it dials the very port that it was given; nobody listens there."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False  # reset meanwhile: reading will tell
