"""One connection on which we read: a request goes out, the answer goes straight into the caller's memory.

Strategy: the receive blocks in the kernel until the rest of a chunk and the header behind it are there
(MSG_WAITALL, bounded by SO_RCVTIMEO): one wake-up per chunk, not per packet, on slow networks too. All that
can be made ready is made ready while the owner works.
Invariants: a header is read before a byte may land in the caller's memory; a stream that was cut short is
never used again (``in_step`` is False).
Threads: one thread reads; another may end that by shutting the socket down.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable
from typing import Protocol

from llm_datadist._core import limits
from llm_datadist._core.segments import Extents
from llm_datadist._logs import get_logger
from llm_datadist._shortages import is_of_system
from llm_datadist.transports._sockets import (
    NOW_NBYTES,
    SEND_NOW,
    WAIT_ALL,
    Buffer,
    Iovecs,
    is_gone,
    receive_if_there,
    receive_into,
    send_now,
    set_receive_timeout,
)
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_frames import (
    CHUNK_NBYTES,
    FIRST_REQUEST,
    HEADER_NBYTES,
    End,
    EndKind,
    FrameError,
    UnitRequests,
    decode_header,
    encode_request,
)

logger = get_logger("llm_datadist.tcp")

_INLINE_NBYTES = 64 << 10  # a selector up to this is joined to its header: one packet, one call

_PROMPT_S = 100e-6  # twice what an owner on the same host needs
_LOOKS = 64  # some 60 microseconds

_TIMEOUT_SHARE = 0.9  # of the time left: the next call need not set it again
_LONGEST_WAIT_S = 3600.0  # of one call into the kernel; a deadline may be infinite


class Units(Protocol):
    """Small streams that differ in the number of a unit and in where they go."""

    @property
    def requests(self) -> UnitRequests:
        """What is asked for."""

    def place(self, iovecs: Iovecs, here: int) -> None:
        """Adds where a unit goes that goes ``here`` bytes into our tensors."""


class _Late(Exception):  # noqa: N818 - TimeoutError is an OSError, and ETIMEDOUT of the network means another thing
    """The deadline has passed."""


class ReadingConnection:
    """A connection and its step in the protocol.

    Attributes:
        in_step: No answer is under way: another request may follow.
        answered: Some byte of the latest answer has come.
        moved: Bytes of the stream that the latest request brought.
    """

    __slots__ = (
        "_clock",
        "_fd",
        "_head",
        "_header",
        "_iovecs",
        "_last_id",
        "_prompt",
        "_timeout",
        "answered",
        "fresh",
        "hello",
        "in_step",
        "moved",
        "sock",
    )

    def __init__(self, sock: socket.socket, clock: Callable[[], float], hello: bytes = b"") -> None:
        self.sock = sock
        self._fd = sock.fileno()
        self.hello = hello  # goes out with the first request
        self.fresh = bool(hello)  # dialled just now: if it is dead, the peer is
        self.in_step = True
        self.answered = False
        self.moved = 0
        self._clock = clock
        self._last_id = FIRST_REQUEST - 1
        self._prompt = False  # the latest answer came at once
        self._iovecs = Iovecs()
        self._head = Buffer(HEADER_NBYTES + limits.ANSWER_TEXT_NBYTES)
        self._header = self._head.view[:HEADER_NBYTES]
        self._timeout = 0.0  # of a receive, as the kernel knows it
        sock.setblocking(True)

    def read(
        self, selector: bytes, destination: Extents, start: int, stop: int, deadline: float
    ) -> Fault | None:
        """Brings bytes [start, stop) of the stream; None when all are there."""
        self.answered, self.moved, self.in_step = False, 0, False
        try:
            self._request(selector, start, stop, deadline)
            return self._answer(destination, start, stop, deadline)
        except _Late:
            return Fault(FaultKind.TIMEOUT, f"{self.moved} of {stop - start} bytes had come")
        except FrameError as exc:
            logger.warning("a data connection is closed: its owner sent %s", exc)
            return Fault(FaultKind.CHANNEL, f"the peer broke the protocol: {exc}", cause=exc)
        except OSError as exc:
            if not is_of_system(exc):
                raise
            return self._fault_of(exc)

    def read_unit(self, units: Units, unit: int, here: int, deadline: float, *, alone: bool) -> bool:
        """Brings a unit to ``here``; whether all of it came, and valid.

        What else may happen is not told: the connection is in step, or it is not.

        Args:
            units: What it is one of.
            unit: Its number.
            here: Bytes into our tensors.
            deadline: When to give up.
            alone: No other thread waits for that owner, so this one may look for the answer of an owner that was
                prompt the last time: a thread that has slept finds its caches cold.
        """
        self.answered, self.moved, self.in_step = False, 0, False
        self._last_id = number = (self._last_id + 1) & 0xFFFFFFFF
        nbytes = units.requests.nbytes
        try:
            data = units.requests.encode(number, unit)
            if send_now(self._fd, data) < len(data):
                return False
            self._iovecs.clear()
            units.place(self._iovecs, here)
            self._iovecs.append(self._head.address, HEADER_NBYTES)
            asked = self._clock()
            self._receive_header(deadline, _LOOKS if alone and self._prompt else 0)
            self._prompt = self._clock() - asked < _PROMPT_S
            header = decode_header(self._header, number, nbytes)
            if header == nbytes:
                self._receive(deadline, nbytes)
                header = decode_header(self._header, number, 0)
            return isinstance(header, End) and self._end(header, deadline) is None
        except (_Late, FrameError):
            return False
        except OSError as exc:
            if not is_of_system(exc):
                raise
            return False

    def _fault_of(self, exc: OSError) -> Fault:
        if exc.errno == errno.EFAULT:
            return Fault(FaultKind.DESTINATION, "the destination is not writable memory", cause=exc)
        if is_gone(exc):
            return Fault(FaultKind.PEER_LOST, f"the data connection is gone: {exc.strerror}", cause=exc)
        return Fault(FaultKind.CHANNEL, f"the data connection failed: {exc}", cause=exc)

    # ---- request -------------------------------------------------------------------------------------

    def _request(self, selector: bytes, start: int, stop: int, deadline: float) -> None:
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        head = self.hello + encode_request(self._last_id, start, stop, selector)
        self.hello = b""
        if len(selector) > _INLINE_NBYTES:
            self._send(head, deadline)
            self._send(selector, deadline)
            return
        data = head + selector
        sent = send_now(self._fd, data)
        if sent < len(data):
            self._send(data[sent:], deadline)

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.sock.send(rest, SEND_NOW) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll(self._left(deadline) * 1000)

    # ---- answer --------------------------------------------------------------------------------------

    def _answer(self, destination: Extents, start: int, stop: int, deadline: float) -> Fault | None:
        at = start
        first = min(CHUNK_NBYTES, stop - at)  # unless the owner differs
        self._iovecs.clear()
        loaded = self._load(destination, at, first)
        self._receive_header(deadline)
        while True:
            header = decode_header(self._header, self._last_id, stop - at)
            if isinstance(header, End):
                return self._end(header, deadline)
            if header != first:
                self._iovecs.clear()
                loaded = 0
            at = self._chunk(destination, at, header, loaded, deadline)
            loaded = first = 0

    def _load(self, destination: Extents, at: int, left: int) -> int:
        """Makes the table ready for runs of a chunk, and behind the last one for the next header."""
        nbytes = self._iovecs.load(destination, at, left, spare=1)
        if nbytes == left:
            self._iovecs.append(self._head.address, HEADER_NBYTES)
        return nbytes

    def _chunk(self, destination: Extents, at: int, left: int, loaded: int, deadline: float) -> int:
        """Receives ``left`` bytes of the stream and the next header; returns where the stream is then.

        ``loaded``: bytes of it that the table is ready for.
        """
        while left:
            nbytes = loaded or self._load(destination, at, left)
            loaded = 0
            at += nbytes
            left -= nbytes
            self._receive(deadline, nbytes)
        return at

    def _end(self, end: End, deadline: float) -> Fault | None:
        if end.text_nbytes:
            self._iovecs.clear()
            self._iovecs.append(self._head.address, end.text_nbytes)
            self._receive(deadline)
        self.in_step = True
        if end.kind is EndKind.OK:
            return None
        text = bytes(self._head.view[: end.text_nbytes]).decode("utf-8", "replace")
        return Fault(FaultKind.SOURCE if end.kind is EndKind.SOURCE else FaultKind.REFUSED, text, end.code)

    def _receive_header(self, deadline: float, looks: int = 0) -> None:
        """The first one of an answer, alone: nothing may land in the caller's memory before it has been read.

        Args:
            deadline: When to give up.
            looks: So often it is looked for without going to sleep.
        """
        missing = HEADER_NBYTES
        self._bound(deadline)
        while missing:
            address = self._head.address + HEADER_NBYTES - missing
            if looks:
                looks -= 1
                count = receive_if_there(self._fd, address, missing)
                if count < 0:
                    continue
            else:
                self._bound(deadline)
                try:
                    count = receive_into(self._fd, address, missing)
                except (BlockingIOError, InterruptedError):
                    continue  # the kernel's time-out, or a signal whose handler has run: look at the clock
            if not count:
                raise _closed()
            self.answered = True
            missing -= count

    def _receive(self, deadline: float, stream_nbytes: int = 0) -> None:
        """Fills the table; its first ``stream_nbytes`` bytes are the caller's."""
        iovecs = self._iovecs
        if iovecs.nbytes <= NOW_NBYTES + HEADER_NBYTES:  # mostly it came together with its header
            stream_nbytes = self._count(iovecs.receive_now(self._fd), stream_nbytes)
        while iovecs.nbytes:
            self._bound(deadline)
            try:
                count = iovecs.receive(self._fd, WAIT_ALL)
            except (BlockingIOError, InterruptedError):
                continue  # as above
            stream_nbytes = self._count(count, stream_nbytes)

    def _count(self, count: int, stream_nbytes: int) -> int:
        """Notes what a receive brought; returns how much of the stream is still to come."""
        if not count:
            raise _closed()
        mine = min(max(0, count), stream_nbytes)
        self.moved += mine
        return stream_nbytes - mine

    def _bound(self, deadline: float) -> None:
        """Has the kernel end the next receive before the deadline."""
        left = self._left(deadline)
        if not left / 2 <= self._timeout <= left:
            self._timeout = left * _TIMEOUT_SHARE
            set_receive_timeout(self.sock, self._timeout)

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise _Late
        return min(left, _LONGEST_WAIT_S)


def _closed() -> OSError:
    return ConnectionResetError(errno.ECONNRESET, "closed by the peer")
