"""The way to one peer over TCP: reads (in one or several stripes) and what the link counts.

Strategy: a small plan takes one connection; a wide one is cut by bytes into stripes, the first of which the
caller's thread moves itself. A kept connection that turns out dead before any byte of the answer came is
replaced: reads may be repeated.
Invariants: a read returns its connections before ``wait`` returns, and then nothing writes any more.
Threads: ``wait`` in any; ``cancel`` and ``close`` meanwhile from any other.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from itertools import pairwise

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint, Progress
from llm_datadist.transports.tcp_pool import ConnectionPool, dial
from llm_datadist.transports.tcp_reading import ReadingConnection
from llm_datadist.transports.tcp_server import MAX_CONNECTIONS, TcpServer

STRIPE_NBYTES = 8 << 20  # least bytes of a stripe: some milliseconds, against 0.1 ms for its thread
_CLOSED = "the link was closed"
_DIAL_S = 10.0  # for connections on which the peer waits; it has a deadline of its own


class TcpChannel:
    """Reads from one peer, and the connections on which that peer reads from us.

    Attributes:
        token: Of the link.
        dialled: Whether this side dialled the link.
        bytes_in: Bytes of streams read from the peer.
        bytes_out: Bytes of streams sent to the peer.
    """

    def __init__(
        self,
        peer: PeerEndpoint,
        *,
        limit: int,
        stripes: int,
        first_frame: Callable[[bytes, bool], bytes],
        server: TcpServer,
        forget: Callable[[TcpChannel], None],
        clock: Callable[[], float],
    ) -> None:
        self.token = peer.link_token
        self.dialled = peer.address is not None
        self.bytes_in = 0
        self.bytes_out = 0
        self.pool = ConnectionPool(peer, limit, lambda: first_frame(peer.link_token, True), clock)
        self._address = peer.address
        self._stripes = stripes
        self._first_frame = first_frame
        self._server = server
        self._forget = forget
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: set[TcpRead] = set()
        self._to_dial = 0
        self._dials = False  # a thread is at it
        self._closed = False

    def read(self, plan: Segments) -> TcpRead:
        """Prepares a read. ``plan.source`` must be a selector."""
        if not isinstance(plan.source, bytes):
            raise TypeError("a TCP read needs a selector, not addresses, as its source")
        return TcpRead(self, plan.source, plan.destination)

    def close(self) -> None:
        """Cancels what runs, in both directions, and closes all connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            reads = list(self._reads)
        for read in reads:
            read.cancel(_CLOSED)
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
            self._to_dial = max(0, min(self._to_dial + count, MAX_CONNECTIONS))
            if self._dials or not self._to_dial:
                return
            self._dials = True
        name = "llm_datadist-dial"
        threading.Thread(target=self._dial_all, args=(self._address,), name=name, daemon=True).start()

    def _dial_all(self, address: tuple[str, int]) -> None:
        while True:
            with self._lock:
                if self._closed or self._to_dial == 0:
                    self._dials = False
                    return
                self._to_dial -= 1
            # The peer notices a failure as a connection that does not come, and asks again.
            with contextlib.suppress(OSError):
                sock = dial(address, self._clock() + _DIAL_S, self._clock, lambda _: True)
                try:
                    sock.sendall(self._first_frame(self.token, False))
                except OSError:
                    sock.close()
                    raise
                self._serve(sock)

    def _serve(self, sock: socket.socket, leftover: bytes = b"") -> None:
        self._server.serve(sock, self, leftover)
        if self._closed:  # meanwhile, and its drop may have come before
            self._server.drop(self)

    # ---- for reads ---------------------------------------------------------------------------------------

    def plan_stripes(self, nbytes: int) -> list[tuple[int, int]]:
        """[start, stop) of each stripe."""
        count = max(1, min(self._stripes, nbytes // STRIPE_NBYTES))
        cuts = [nbytes * i // count for i in range(count + 1)]
        return list(pairwise(cuts))

    def count_in(self, nbytes: int) -> None:
        """Adds to ``bytes_in``."""
        with self._lock:
            self.bytes_in += nbytes

    def began(self, read: TcpRead) -> None:
        """``close`` must cancel this read."""
        with self._lock:
            self._reads.add(read)
            closed = self._closed
        if closed:
            read.cancel(_CLOSED)

    def ended(self, read: TcpRead) -> None:
        """The read will not be cancelled any more."""
        with self._lock:
            self._reads.discard(read)


class TcpRead:
    """One read: see ``seam.Completion``."""

    def __init__(self, channel: TcpChannel, selector: bytes, destination: Extents) -> None:
        self._channel = channel
        self._selector = selector
        self._destination = destination
        self._lock = threading.Lock()
        self._cancelled: Fault | None = None
        self._stripes: list[_Stripe] = []
        self._result: Progress | None = None

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes; see the seam."""
        if self._result is None:
            self._channel.began(self)
            try:
                self._result = self._run(deadline)
            finally:
                self._channel.ended(self)
        return self._result

    def cancel(self, reason: str = "") -> None:
        """Makes ``wait`` return soon. The first reason counts."""
        with self._lock:
            if self._cancelled is None:
                self._cancelled = Fault(FaultKind.CANCELLED, reason or "the read was cancelled")
            for stripe in self._stripes:
                stripe.interrupt()
        self._channel.pool.wake()

    def stopped(self) -> Fault | None:
        """Why this read must not go on."""
        return self._cancelled

    def _run(self, deadline: float) -> Progress:
        nbytes = self._destination.nbytes
        if not nbytes:
            return Progress(0, self._cancelled)
        ranges = self._channel.plan_stripes(nbytes)
        stripes = [_Stripe(self, self._channel, self._selector, self._destination, *r) for r in ranges]
        with self._lock:
            self._stripes = stripes
        helpers: list[threading.Thread] = []
        try:
            for stripe in stripes[1:]:
                helper = threading.Thread(
                    target=self._run_one, args=(stripe, deadline), name="llm_datadist-stripe", daemon=True
                )
                helper.start()
                helpers.append(helper)
            self._run_one(stripes[0], deadline)
        except BaseException:
            self.cancel("the reading thread was interrupted")
            raise
        finally:
            for helper in helpers:
                helper.join()
        moved = sum(s.moved for s in stripes)
        self._channel.count_in(moved)
        fault = self._fault_of(stripes)
        if fault is None and moved != nbytes:  # a helper that died of a bug of ours
            fault = Fault(FaultKind.CHANNEL, f"{moved} of {nbytes} bytes were read")
        return Progress(moved, fault)

    def _run_one(self, stripe: _Stripe, deadline: float) -> None:
        stripe.run(deadline)
        if stripe.fault is not None and len(self._stripes) > 1:
            self.cancel("another part of the read failed")

    def _fault_of(self, stripes: list[_Stripe]) -> Fault | None:
        """The first fault, but a cause before its consequence."""
        faults = [s.fault for s in stripes if s.fault is not None]
        return next((f for f in faults if f.kind is not FaultKind.CANCELLED), faults[0] if faults else None)


class _Stripe:
    """A range of the stream on one connection (or on its replacement)."""

    def __init__(
        self, read: TcpRead, channel: TcpChannel, selector: bytes, destination: Extents, start: int, stop: int
    ) -> None:
        self.moved = 0
        self.fault: Fault | None = None
        self._read = read
        self._pool = channel.pool
        self._selector = selector
        self._destination = destination
        self._range = (start, stop)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def run(self, deadline: float) -> None:
        """Reads the range; sets ``moved`` and ``fault``."""
        for _ in range(self._pool.limit + 1):  # every kept connection may be dead
            connection = self._pool.take(self, deadline)
            if isinstance(connection, Fault):
                self.fault = connection
                return
            if not self._attempt(connection, deadline):
                return

    def _attempt(self, connection: ReadingConnection, deadline: float) -> bool:
        """One try. True: the connection was a dead one, kept from before; nothing came of it."""
        try:
            if not self.hold(connection.sock):
                self.fault = self.stopped()
                return False
            fault = connection.read(self._selector, self._destination, *self._range, deadline)
            self.moved = connection.moved
        finally:
            self.hold(None)
            if self.stopped() is not None:
                connection.in_step = False  # it may have been shut down
            self._pool.give_back(connection)
        if fault is not None and fault.kind is FaultKind.PEER_LOST and self.stopped() is not None:
            fault = self.stopped()
        self.fault = fault
        dead = fault is not None and fault.kind is FaultKind.PEER_LOST
        return dead and not connection.fresh and not connection.answered

    # ---- Taker ---------------------------------------------------------------------------------------------

    def stopped(self) -> Fault | None:
        """Why the read must not go on."""
        return self._read.stopped()

    def hold(self, sock: socket.socket | None) -> bool:
        """What ``interrupt`` shuts down from now on. False: it is too late, do not go on."""
        with self._lock:
            self._sock = sock
        return self.stopped() is None

    def interrupt(self) -> None:
        """Ends what blocks."""
        with self._lock:
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
