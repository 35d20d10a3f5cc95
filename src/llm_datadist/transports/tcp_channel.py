"""The way to one peer over TCP: reads (in one or several stripes) and what the link counts.

Strategy: a small plan takes one connection; a wide one is cut by bytes into stripes, the first of which the
caller's thread moves itself. Near by, processors decide how many (copying is what takes the time); far away
there are always several, because each connection recovers from its own lost packets alone. A kept connection
that turns out dead before any byte of the answer came is replaced: reads may be repeated.
Invariants: a read returns its connections before ``wait`` returns, and then nothing writes any more.
Threads: ``wait`` in any; ``cancel`` and ``close`` meanwhile from any other.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

from llm_datadist._core import limits
from llm_datadist._core.quota import Quota
from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist._logs import get_logger
from llm_datadist._shortages import is_shortage, reason_of, start_thread
from llm_datadist._waiting import Latch
from llm_datadist.status import OutOfMemoryError
from llm_datadist.transports._sockets import NOW_NBYTES
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint, Progress
from llm_datadist.transports.tcp_pool import ConnectionPool, Taker, dial
from llm_datadist.transports.tcp_server import TcpServer
from llm_datadist.transports.tcp_units import TcpUnits

logger = get_logger("llm_datadist.tcp")

MAX_UNIT_TENSORS = 256  # of a read by units: whoever has more does not feel what they save
STRIPE_NBYTES = 8 << 20  # least bytes of a stripe: some milliseconds, against 0.1 ms for its thread
# The same where each lost packet costs its connection a round trip and half its speed.
FAR_STRIPE_NBYTES = 1 << 20
FAR_S = 0.002  # a round trip from which a peer is far: beyond what a building has
_DIAL_S = 10.0  # for connections on which the peer waits; it has a deadline of its own


class TcpChannel:
    """Reads from one peer, and the connections on which that peer reads from us.

    Attributes:
        token: Of the link.
        dialled: Whether this side dialled the link.
        bytes_out: Bytes of streams sent to the peer.
    """

    def __init__(
        self,
        peer: PeerEndpoint,
        *,
        limit: int,
        stripes: int,
        far_stripes: int,
        helpers: Helpers,
        first_frame: Callable[[bytes, bool], bytes],
        server: TcpServer,
        forget: Callable[[TcpChannel], None],
        clock: Callable[[], float],
    ) -> None:
        self.token = peer.link_token
        self.dialled = peer.address is not None
        self.bytes_out = 0
        self.pool = ConnectionPool(peer, limit, lambda: first_frame(peer.link_token, True), clock)
        self._address = peer.address
        self._stripes = stripes
        self._far_stripes = far_stripes
        self._helpers = helpers
        self._first_frame = first_frame
        self._server = server
        self._forget = forget
        self._clock = clock
        self._lock = threading.Lock()
        self._to_dial = 0
        self._dials = False  # a thread is at it
        self._closed = False

    @property
    def bytes_in(self) -> int:
        """Bytes of streams read from the peer."""
        return self.pool.bytes_in

    def read(self, plan: Segments) -> TcpRead | StripedRead:
        """Prepares a read. ``plan.source`` must be a selector."""
        selector, destination = plan.source, plan.destination
        if not isinstance(selector, bytes):
            raise TypeError("a TCP read needs a selector, not addresses, as its source")
        nbytes = destination.nbytes
        count = self._count_stripes(nbytes)
        if count < 2:
            return TcpRead(self.pool, selector, destination, 0, nbytes)
        cuts = [nbytes * i // count for i in range(count + 1)]
        parts = [TcpRead(self.pool, selector, destination, *cut) for cut in pairwise(cuts)]
        return StripedRead(parts, nbytes, self._helpers, self.token)

    def units(self, head: bytes, destination: U64, nbytes: int) -> TcpUnits | None:
        """See the seam. Only what an owner sends at once, and a table of iovecs holds."""
        count = len(destination)
        if not 0 < count * nbytes <= NOW_NBYTES or count > MAX_UNIT_TENSORS:
            return None
        return TcpUnits(self.pool, head, destination, nbytes)

    def _count_stripes(self, nbytes: int) -> int:
        if self.pool.round_trip_s >= FAR_S:
            return min(self._far_stripes, nbytes // FAR_STRIPE_NBYTES)
        return min(self._stripes, nbytes // STRIPE_NBYTES)

    def close(self) -> None:
        """Cancels what runs, in both directions, and closes all connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.pool.close()
        self._server.drop(self)
        self._forget(self)

    def adopt(self, sock: socket.socket, peer_reads: bool, leftover: bytes) -> None:
        """A connection of this link came in."""
        if peer_reads:
            self._serve(sock, leftover)
        elif leftover:  # the owner speaks only when asked
            sock.close()
        else:
            self.pool.adopt(sock)

    def dial_for_peer(self, count: int) -> None:
        """Dials connections on which the peer reads, in the background."""
        with self._lock:
            if self._closed or self._address is None:
                return
            self._to_dial = max(0, min(self._to_dial + count, limits.CONNECTIONS))
            if self._dials or not self._to_dial:
                return
            self._dials = True
        try:
            start_thread(functools.partial(self._dial_all, self._address), "llm-datadist-dial")
        except OutOfMemoryError as exc:  # the peer asks again
            logger.warning("no data connection is dialled for the peer that reads: %s", exc)
            with self._lock:
                self._dials, self._to_dial = False, 0

    def _dial_all(self, address: tuple[str, int]) -> None:
        while True:
            with self._lock:
                if self._closed or self._to_dial == 0:
                    self._dials = False
                    return
                self._to_dial -= 1
            try:
                self._dial_one(address)
            except Exception as exc:  # the peer notices it as a connection that does not come, and asks again
                if is_shortage(exc) or not isinstance(exc, OSError):
                    logger.warning(
                        "no data connection is dialled for the peer that reads: %s", reason_of(exc)
                    )

    def _dial_one(self, address: tuple[str, int]) -> None:
        sock = dial(address, self._clock() + _DIAL_S, self._clock, lambda _: True)
        try:
            sock.sendall(self._first_frame(self.token, False))
        except BaseException:
            sock.close()
            raise
        self._serve(sock)

    def _serve(self, sock: socket.socket, leftover: bytes = b"") -> None:
        self._server.serve(sock, self, leftover)
        if self._closed:  # meanwhile, and its drop may have come before
            self._server.drop(self)


class TcpRead(Taker):
    """A read of one range of the stream on one connection (or on its replacement): see ``seam.Completion``."""

    __slots__ = ("_destination", "_pool", "_result", "_selector", "_start", "_stop")

    def __init__(
        self, pool: ConnectionPool, selector: bytes, destination: Extents, start: int, stop: int
    ) -> None:
        self.sock = self.cancelled = self._under_way = None
        self._pool = pool
        self._selector = selector
        self._destination = destination
        self._start = start
        self._stop = stop
        self._result: Progress | None = None

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes; see the seam."""
        if self._result is None:
            with self.during():
                self._result = (
                    self._run(deadline) if self._stop > self._start else Progress(0, self.cancelled)
                )
        return self._result

    def cancel(self, reason: str = "") -> None:
        """Makes ``wait`` return soon. The first reason counts."""
        self._pool.cancel(self, Fault(FaultKind.CANCELLED, reason or "the read was cancelled"))

    def _run(self, deadline: float) -> Progress:
        pool = self._pool
        fault: Fault | None = None
        for _ in range(pool.limit + 1):  # every kept connection may be dead
            try:
                connection = pool.take(self, deadline)
                if isinstance(connection, Fault):
                    return Progress(0, connection)
                fault = connection.read(self._selector, self._destination, self._start, self._stop, deadline)
                pool.give_back(self, connection)
            except BaseException:  # an interrupt, which may come at any step of these
                pool.reclaim(self)
                raise
            if fault is None:
                return Progress(connection.moved)
            if fault.kind is not FaultKind.PEER_LOST:
                return Progress(connection.moved, fault)
            if self.cancelled is not None or connection.fresh or connection.answered:
                return Progress(connection.moved, self.cancelled or fault)
            pool.drop_dead()
        return Progress(0, fault)


class _Shared:
    """A part that a helper reads, or the caller, if it comes to it before.

    Attributes:
        part: It.
        ended: Its helper has.
    """

    __slots__ = ("_whose", "ended", "part")

    def __init__(self, part: TcpRead) -> None:
        self.part = part
        self.ended = Latch()
        self._whose: dict[str, str] = {}  # at most one entry: ``setdefault`` decides in one step

    def take(self, who: str) -> bool:
        """Whether it is theirs: the first has it, however often they ask."""
        return self._whose.setdefault("whose", who) == who


class Helpers:
    """How many threads read parts of wide reads, for all links. Threads: any that no signal strikes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quota = Quota(limits.STRIPES)

    @contextmanager
    def one_of(self, link: bytes) -> Iterator[bool]:
        """Whether this thread may be one of them, while inside."""
        with self._lock:
            may = self._quota.may_take(link, link)
            if may:
                self._quota.take(link, link)
        try:
            yield may
        finally:
            if may:
                with self._lock:
                    self._quota.give(link, link)


class StripedRead:
    """A wide read: parts of it on several connections at once."""

    __slots__ = ("_helpers", "_link", "_nbytes", "_parts", "_result", "_results")

    def __init__(self, parts: list[TcpRead], nbytes: int, helpers: Helpers, link: bytes) -> None:
        self._parts = parts
        self._nbytes = nbytes
        self._helpers = helpers
        self._link = link
        self._results: list[Progress] = []
        self._result: Progress | None = None

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes, the first part in the caller's thread; see the seam."""
        if self._result is None:
            self._result = self._run(deadline)
        return self._result

    def cancel(self, reason: str = "") -> None:
        """Makes ``wait`` return soon. The first reason counts."""
        for part in self._parts:
            part.cancel(reason)

    def _run(self, deadline: float) -> Progress:
        first, *others = self._parts
        shared = [_Shared(part) for part in others]
        helpers: list[threading.Thread] = []
        try:
            for entry in shared:
                run = functools.partial(self._help, entry, deadline)
                with suppress(OutOfMemoryError):  # then it is read here
                    helpers.append(start_thread(run, "llm-datadist-stripe"))
            self._run_one(first, deadline)
            for entry in shared:
                if entry.take("caller"):
                    self._run_one(entry.part, deadline)
        except BaseException:
            self._await(shared, cut=True)
            raise
        self._await(shared, cut=False)
        for helper in helpers:
            helper.join()
        moved = sum(result.nbytes for result in self._results)
        # A part that fails is noted before it cancels the others: the cause is the first.
        fault = next((result.fault for result in self._results if result.fault is not None), None)
        if fault is None and moved != self._nbytes:  # a helper that died of a bug of ours
            fault = Fault(FaultKind.CHANNEL, f"{moved} of {self._nbytes} bytes were read")
        return Progress(moved, fault)

    def _help(self, entry: _Shared, deadline: float) -> None:
        try:
            with self._helpers.one_of(self._link) as is_one:
                if is_one and entry.take("helper"):  # else the caller comes to it
                    self._run_one(entry.part, deadline)
        finally:
            entry.ended.open()

    def _await(self, shared: list[_Shared], *, cut: bool) -> None:
        """Returns when no helper reads any more, or will. ``cut``: the caller was interrupted."""
        raised: BaseException | None = None
        while True:
            try:
                if cut:
                    self.cancel("the reading thread was interrupted")
                for entry in shared:
                    if not entry.take("caller"):
                        entry.ended.wait()
                break
            except BaseException as exc:  # a signal handler's: after the wait
                cut, raised = True, exc
        if raised is not None:
            raise raised

    def _run_one(self, part: TcpRead, deadline: float) -> None:
        result = part.wait(deadline=deadline)
        self._results.append(result)
        if result.fault is not None:
            self.cancel("another part of the read failed")
