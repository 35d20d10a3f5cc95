"""The data connections of one link on which we read: idle ones, and how to get more.

Strategy: last in, first out, so that few connections serve a light load; grown on demand up to a limit, so
that a big slow read does not keep a small one waiting. The side that dialled the link dials in the reader's
thread; the other side asks for a connection and waits until it has come in.
Invariants: every open socket is in ``_open`` (what a forked child must close); ``_open`` and the dials under
way never exceed the limit. What is in ``_open`` is idle or a taker's: anything else is what an interrupt left.
Threads: one lock; nothing blocks under it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from llm_datadist._shortages import is_of_system, is_shortage, reason_of
from llm_datadist._waiting import Changes, Lasting, Ticket, guard
from llm_datadist.transports._sockets import is_gone, round_trip_s, tune
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint
from llm_datadist.transports.tcp_reading import ReadingConnection

_ASK_AGAIN_S = 1.0  # the peer may have failed to dial; well above a round trip
_SHORT_S = 0.1  # between two tries where there are no descriptors
_PATIENCE_S, _PATIENCE = (
    1.0,
    0.8,
)  # with that, and this part of a read's time at most; so that it is told in time
_LONGEST_WAIT_S = 3600.0
_CLOSED = Fault(FaultKind.CANCELLED, "the link was closed")


class Taker(Lasting):
    """A read that needs a connection, and can be cancelled while it waits for one or uses it.

    Attributes:
        sock: What a cancel must shut down. Guarded by the lock of the pool.
        cancelled: Why the read must not go on.
    """

    __slots__ = ("cancelled", "sock")

    def __init__(self) -> None:
        super().__init__()
        self.sock: socket.socket | None = None
        self.cancelled: Fault | None = None


class ConnectionPool:
    """Connections to read from one peer.

    Attributes:
        bytes_in: Bytes of streams read on them.
        round_trip_s: To the peer and back, as it was when the latest connection came; 0.0 before the first.
    """

    def __init__(
        self,
        peer: PeerEndpoint,
        limit: int,
        hello: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._peer = peer
        self.limit = limit
        self.bytes_in = 0
        self.round_trip_s = 0.0
        self._hello = hello
        self._clock = clock
        self._lock = guard(self)
        self._changes = Changes(self._lock)
        self._idle: list[ReadingConnection] = []
        self._open: set[socket.socket] = set()
        self._busy: set[Taker] = set()  # those with a socket, or about to have one
        self._dialling: set[Taker] = set()  # or about to
        self._waiting: set[Taker] = set()
        self._asked: deque[float] = deque()  # when; as many as have not come in
        self._short_until = 0.0  # until then no other one is dialled: there was no descriptor for it
        self._closed = False

    @property
    def readers(self) -> int:
        """Who has a connection, or is about to have one."""
        return len(self._busy)

    def take_idle(self, taker: Taker) -> ReadingConnection | None:
        """An idle connection, if there is one. Must be given back, or reclaimed."""
        with self._lock:
            # None is kept once the pool is closed.
            return self._lend(taker) if self._idle and taker.cancelled is None else None

    def take(self, taker: Taker, deadline: float) -> ReadingConnection | Fault:
        """An idle connection or a new one, by the deadline. Must be given back, or reclaimed."""
        idle = self.take_idle(taker)
        if idle is not None:
            return idle
        late, now = "no time was left to ask", self._clock()
        patient_until = now + min(_PATIENCE_S, _PATIENCE * (deadline - now))
        waited = False
        while True:
            with self._lock:
                self._waiting.add(taker)  # also by ``reclaim`` it is taken out
                found = self._find(taker, deadline, late)
                if waited and self._has_waited_in_vain(found, patient_until):
                    found = _shortage() or found
                if not isinstance(found, Ticket):
                    self._waiting.discard(taker)
            if isinstance(found, Ticket):
                late, waited = "the time was over before a data connection was to be had", True
                found.sleep(deadline - self._clock())
                continue
            if found is not None:
                return found
            if self._peer.address is None:
                self._peer.ask_for_connections(1)
                continue
            dialled = self._dial(taker, self._peer.address, deadline)
            if not isinstance(dialled, Fault) or not self._may_wait_instead(dialled):
                return dialled

    def give_back(self, taker: Taker, connection: ReadingConnection) -> None:
        """The read is over: the connection is kept if it is in step."""
        with self._lock:
            taker.sock = None
            self._busy.discard(taker)
            self.bytes_in += connection.moved
            # One that was cancelled may have been shut down.
            if connection.in_step and taker.cancelled is None and not self._closed:
                connection.fresh = False
                self._idle.append(connection)
            else:
                self._drop(connection.sock)
            if self._waiting:
                self._changes.notify_all()

    def drop_dead(self) -> None:
        """Closes idle connections on which there is news: nothing comes there unasked but their end."""
        with self._lock:
            for connection in [c for c in self._idle if _has_news(c.sock)]:
                self._idle.remove(connection)
                self._drop(connection.sock)

    def reclaim(self, taker: Taker) -> None:
        """An exception ended a read, at whatever step, also of this class: what it held is closed."""
        with self._lock:
            self._reclaim([taker])
            self._changes.notify_all()

    def cancel(self, taker: Taker, fault: Fault) -> None:
        """Ends what a taker waits for. The first fault counts."""
        with self._lock:
            self._cancel(taker, fault)
            self._changes.notify_all()

    def adopt(self, sock: socket.socket) -> None:
        """A connection that the peer dialled for us; it may have given it up since, where it came in late."""
        if _has_news(sock):
            sock.close()
            return
        with self._lock:
            if self._asked:
                self._asked.popleft()
            if self._closed or len(self._open) >= self.limit:
                sock.close()
                return
            self._add(sock)
            self._idle.append(ReadingConnection(sock, self._clock))
            self._changes.notify_all()

    def close(self) -> None:
        """Closes what is idle and cancels what is in use, which is closed when it is given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in idle:
                self._drop(connection.sock)
            for taker in self._busy:
                self._cancel(taker, _CLOSED)
            self._reclaim_all()
            self._changes.notify_all()

    def sockets(self) -> list[socket.socket]:
        """All that is open, for a forked child; takes no lock."""
        return list(self._open)

    def _add(self, sock: socket.socket) -> None:
        self._open.add(sock)
        self.round_trip_s = round_trip_s(sock)

    def _drop(self, sock: socket.socket) -> None:
        sock.close()
        self._open.discard(sock)

    def _reclaim(self, takers: Iterable[Taker]) -> None:
        for taker in takers:
            self._waiting.discard(taker)
            self._busy.discard(taker)
            self._dialling.discard(taker)
            self._asked.clear()  # it may not have come to ask; one too many is closed when it comes in
            sock, taker.sock = taker.sock, None
            if sock is not None:  # which may not be in ``_open`` yet
                self._drop(sock)
        held = {c.sock for c in self._idle} | {t.sock for t in self._busy}
        for sock in self._open - held:
            self._drop(sock)

    def _reclaim_all(self) -> None:
        """What reads have left whose ``reclaim`` was interrupted as well."""
        self._reclaim([t for t in self._busy | self._dialling | self._waiting if t.is_over])

    def _lend(self, taker: Taker) -> ReadingConnection:
        connection = self._idle.pop()
        taker.sock = connection.sock
        self._busy.add(taker)
        return connection

    def _cancel(self, taker: Taker, fault: Fault) -> None:
        if taker.cancelled is None:
            taker.cancelled = fault
        if taker.sock is not None:
            with contextlib.suppress(OSError):
                taker.sock.shutdown(socket.SHUT_RDWR)

    # ---- getting one -----------------------------------------------------------------------------------

    def _find(self, taker: Taker, deadline: float, late: str) -> ReadingConnection | Fault | Ticket | None:
        """An idle connection. A ticket: not yet. None: there may be one more, which the caller must get."""
        now = self._clock()
        if taker.cancelled is not None or self._closed:
            return taker.cancelled or _CLOSED
        if now >= deadline:
            return Fault(FaultKind.TIMEOUT, late)
        if self._idle:
            return self._lend(taker)
        if self._may_grow(taker, now):
            return None
        self._reclaim_all()
        return None if self._may_grow(taker, now) else self._changes.ticket()

    def _has_waited_in_vain(self, found: object, patient_until: float) -> bool:
        """Whether it is time to see why: it is over, or none comes while none is in use that will be idle again."""
        if isinstance(found, Ticket):
            return not self._open and self._clock() >= patient_until
        return isinstance(found, Fault) and found.kind is FaultKind.TIMEOUT

    def _may_wait_instead(self, fault: Fault) -> bool:
        """Whether it was for want of descriptors, and there are connections in use that will be idle again."""
        if fault.cause is None or not is_shortage(fault.cause):
            return False
        with self._lock:
            self._short_until = self._clock() + _SHORT_S
            return bool(self._open)

    def _may_grow(self, taker: Taker, now: float) -> bool:
        while self._asked and self._asked[0] <= now - _ASK_AGAIN_S:
            self._asked.popleft()
        if len(self._open) + len(self._dialling) + len(self._asked) >= self.limit:
            return False
        if self._open and now < self._short_until:
            return False
        if self._peer.address is None:
            if len(self._asked) >= len(self._waiting):
                return False  # one is on its way for each of us
            self._asked.append(now)
        else:
            self._dialling.add(taker)
        return True

    def _dial(self, taker: Taker, address: tuple[str, int], deadline: float) -> ReadingConnection | Fault:
        hello = self._hello()
        sock: socket.socket | None = None
        try:
            sock = dial(address, deadline, self._clock, lambda s: self._dials(taker, s))
            return ReadingConnection(sock, self._clock, hello)
        except OSError as exc:
            if not is_of_system(exc):
                raise
            return taker.cancelled or self._dial_fault(exc, address, deadline)
        finally:
            with self._lock:
                self._dialling.discard(taker)
                if sock is not None:
                    self._add(sock)
                else:
                    self._busy.discard(taker)
                self._changes.notify_all()

    def _dials(self, taker: Taker, sock: socket.socket | None) -> bool:
        """What a cancel must shut down from now on. False: it is too late, do not go on."""
        with self._lock:
            taker.sock = sock
            self._busy.add(taker)  # as long as it does not give a connection back, or fails to get one
            if self._closed and taker.cancelled is None:
                taker.cancelled = _CLOSED
            return taker.cancelled is None

    def _dial_fault(self, exc: OSError, address: tuple[str, int], deadline: float) -> Fault:
        where = f"data connection to {address[0]} port {address[1]}"
        if self._clock() >= deadline:
            return Fault(FaultKind.TIMEOUT, f"{where}: no answer in time", cause=exc)
        kind = FaultKind.PEER_LOST if is_gone(exc) else FaultKind.CHANNEL
        return Fault(kind, f"{where}: {reason_of(exc)}", cause=exc)


def _shortage() -> Fault | None:
    """Why there is no other connection, if that is for want of descriptors here."""
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError as exc:
        if is_shortage(exc):
            return Fault(FaultKind.CHANNEL, f"no data connection is to be had: {reason_of(exc)}", cause=exc)
    return None


def _has_news(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


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
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"no address for {address[0]}")
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
            if not is_of_system(exc):
                raise
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
