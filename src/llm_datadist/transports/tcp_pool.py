"""The data connections of one link on which we read: idle ones, and how to get more.

Strategy: last in, first out, so that few connections serve a light load; grown on demand up to a limit, so
that a big slow read does not keep a small one waiting. The side that dialled the link dials in the reader's
thread; the other side asks for a connection and waits until it has come in.
Invariants: every open socket is in ``_open`` (what a forked child must close); ``_open`` and the dials under
way never exceed the limit.
Threads: one lock; nothing blocks under it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from llm_datadist.transports._sockets import is_gone, tune
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint
from llm_datadist.transports.tcp_reading import ReadingConnection

_ASK_AGAIN_S = 1.0  # the peer may have failed to dial; well above a round trip
_LONGEST_WAIT_S = 3600.0


class Taker(Protocol):
    """A read that needs a connection, and can be cancelled while it waits for one."""

    def stopped(self) -> Fault | None:
        """Why it must not go on."""

    def hold(self, sock: socket.socket | None) -> bool:
        """The socket that a cancel must shut down from now on. False: it is cancelled already."""


class ConnectionPool:
    """Connections to read from one peer."""

    def __init__(
        self,
        peer: PeerEndpoint,
        limit: int,
        hello: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._peer = peer
        self.limit = limit
        self._hello = hello
        self._clock = clock
        self._cond = threading.Condition(threading.Lock())
        self._idle: list[ReadingConnection] = []
        self._open: set[socket.socket] = set()
        self._dialling = 0
        self._waiting = 0  # takers in ``_find``
        self._asked: deque[float] = deque()  # when; as many as have not come in
        self._closed = False

    def take(self, taker: Taker, deadline: float) -> ReadingConnection | Fault:
        """An idle connection or a new one, by the deadline."""
        while True:
            with self._cond:
                self._waiting += 1
                try:
                    found = self._find(taker, deadline)
                finally:
                    self._waiting -= 1
            if found is not None:
                return found
            if self._peer.address is not None:
                return self._dial(taker, self._peer.address, deadline)
            self._peer.ask_for_connections(1)

    def give_back(self, connection: ReadingConnection) -> None:
        """The read is over: the connection is kept if it is in step."""
        with self._cond:
            if connection.in_step and not self._closed:
                connection.fresh = False
                self._idle.append(connection)
            else:
                self._open.discard(connection.sock)
                connection.sock.close()
            self._cond.notify()

    def adopt(self, sock: socket.socket) -> None:
        """A connection that the peer dialled for us."""
        with self._cond:
            if self._asked:
                self._asked.popleft()
            if self._closed or len(self._open) >= self.limit:
                sock.close()
                return
            self._open.add(sock)
            self._idle.append(ReadingConnection(sock, self._clock))
            self._cond.notify()

    def wake(self) -> None:
        """Lets waiting takers look at ``stopped`` again."""
        with self._cond:
            self._cond.notify_all()

    def close(self) -> None:
        """Closes what is idle; what is in use is closed when it is given back. Idempotent."""
        with self._cond:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in idle:
                self._open.discard(connection.sock)
                connection.sock.close()
            self._cond.notify_all()

    def sockets(self) -> list[socket.socket]:
        """All that is open, for a forked child; takes no lock."""
        return list(self._open)

    # ---- getting one -----------------------------------------------------------------------------------

    def _find(self, taker: Taker, deadline: float) -> ReadingConnection | Fault | None:
        """Waits for an idle connection. None: there may be one more, which the caller must get."""
        while True:
            now = self._clock()
            if self._closed:
                return Fault(FaultKind.CANCELLED, "the link was closed")
            stopped = taker.stopped()
            if stopped is not None:
                return stopped
            if now >= deadline:
                return Fault(FaultKind.TIMEOUT, "the time was over before a data connection was to be had")
            if self._idle:
                return self._idle.pop()
            if self._may_grow(now):
                return None
            self._cond.wait(min(deadline - now, _ASK_AGAIN_S if self._asked else _LONGEST_WAIT_S))

    def _may_grow(self, now: float) -> bool:
        while self._asked and self._asked[0] <= now - _ASK_AGAIN_S:
            self._asked.popleft()
        if len(self._open) + self._dialling + len(self._asked) >= self.limit:
            return False
        if self._peer.address is None:
            if len(self._asked) >= self._waiting:
                return False  # one is on its way for each of us
            self._asked.append(now)
        else:
            self._dialling += 1
        return True

    def _dial(self, taker: Taker, address: tuple[str, int], deadline: float) -> ReadingConnection | Fault:
        hello = self._hello()
        sock: socket.socket | None = None
        try:
            sock = dial(address, deadline, self._clock, taker.hold)
            return ReadingConnection(sock, self._clock, hello)
        except OSError as exc:
            return taker.stopped() or self._dial_fault(exc, address, deadline)
        finally:
            with self._cond:
                self._dialling -= 1
                if sock is not None:
                    self._open.add(sock)
                self._cond.notify()

    def _dial_fault(self, exc: OSError, address: tuple[str, int], deadline: float) -> Fault:
        where = f"data connection to {address[0]} port {address[1]}"
        if self._clock() >= deadline:
            return Fault(FaultKind.TIMEOUT, f"{where}: no answer in time", cause=exc)
        kind = FaultKind.PEER_LOST if is_gone(exc) else FaultKind.CHANNEL
        return Fault(kind, f"{where}: {exc.strerror or exc}", cause=exc)


def dial(
    address: tuple[str, int],
    deadline: float,
    clock: Callable[[], float],
    hold: Callable[[socket.socket | None], bool],
) -> socket.socket:
    """A connected socket, trying each address of the host in turn.

    Args:
        address: Host and port.
        deadline: When to give up.
        clock: The time now.
        hold: Is shown the socket being connected; shutting it down ends the attempt. False: do not go on.

    Raises:
        OSError: None could be reached; the last reason.
    """
    failure: OSError = OSError(f"no address for {address[0]}")
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect(sock, where, deadline, clock, hold)
            tune(sock)
            return sock
        except OSError as exc:
            failure = exc
            hold(None)
            sock.close()
    raise failure


def _connect(
    sock: socket.socket,
    where: tuple[Any, ...],
    deadline: float,
    clock: Callable[[], float],
    hold: Callable[[socket.socket | None], bool],
) -> None:
    sock.setblocking(False)
    number = sock.connect_ex(where)
    # Held only now: shutting down a socket that does not connect yet would not stop it from doing so.
    if not hold(sock):
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
    if number == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        left = max(0.0, min(deadline - clock(), _LONGEST_WAIT_S))
        answered = poller.poll(left * 1000)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if answered else errno.ETIMEDOUT
    if number:
        raise OSError(number, os.strerror(number))
