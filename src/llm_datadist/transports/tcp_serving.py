"""One connection on which a peer reads: requests in, answers out, a turn at a time.

Strategy: bytes go from the owner's memory into the socket with ``sendmsg``. A small answer goes out whole, in
one call within ``ReadSource.send_now``; of a large one the END is sent only after the source has been checked
once more, so what a reader accepts was valid to the last byte. Memory that turns out unreadable in mid-chunk
is answered with zeros and a fault, which keeps the connection in step.
Threads: everything here but ``open_aside`` runs on the serving thread. Nothing blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from typing import Protocol

from llm_datadist._core import limits
from llm_datadist._core.segments import Extents
from llm_datadist._logs import get_logger
from llm_datadist.status import LLMStatusCode
from llm_datadist.transports._libc import first_unreadable
from llm_datadist.transports._sockets import MORE, NO_WAIT, NOW_NBYTES, Buffer, Iovecs
from llm_datadist.transports.seam import Fault, FaultKind, ReadSource, ServedUnits, Serving
from llm_datadist.transports.tcp_frames import (
    CHUNK_NBYTES,
    HEADER_NBYTES,
    REQUEST_NBYTES,
    EndKind,
    Request,
    RequestParser,
    encode_data,
    encode_end,
    middle_of,
    put_whole,
    unit_of,
)

logger = get_logger("llm_datadist.tcp")

_ZEROS = Buffer(64 << 10)
_NOW_SELECTOR_NBYTES = 4 << 10  # a longer one takes its time to be read; nobody is kept waiting for that


class ServedLink(Protocol):
    """The link that a connection belongs to. ``dialled``: by this side, as are its data connections."""

    token: bytes
    dialled: bool
    bytes_out: int


class ServedConnection:
    """The state of one serving connection."""

    def __init__(self, sock: socket.socket, link: ServedLink, source: ReadSource) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.link = link
        self.busy = False  # an answer is under way or due: the connection waits to be written, not read
        self.wants_write = False  # what the serving thread has registered
        self._source = source
        self._parser = RequestParser()
        self._known: dict[bytes, tuple[ServedUnits, int]] = {}
        self._request: Request | None = None  # come in, not begun
        self.aside: Request | None = None  # the same, with a long selector, which is being opened elsewhere
        self._iovecs = Iovecs()
        self._head = Buffer(HEADER_NBYTES + limits.ANSWER_TEXT_NBYTES)
        self._end = Buffer(HEADER_NBYTES)  # of an answer sent at once
        self._sent = 0  # of an answer sent at once
        self._serving: Serving | None = None
        self._request_id = 0
        self._at = self._stop = 0  # stream positions: the next byte to load, the end
        self._chunk_left = 0  # bytes of the current chunk that are not loaded yet
        self._turn_left = 0  # and how many of them may be loaded before others have their turn
        self._head_left = 0  # bytes of the current chunk's header that are not sent yet
        self._fault: Fault | None = None
        self._ending = False

    @property
    def token(self) -> bytes:
        """Of its link."""
        return self.link.token

    @property
    def claimed(self) -> int:
        """Bytes of the selector that is coming in, as its request says."""
        return self._parser.claimed

    def feed(self, data: memoryview) -> None:
        """Takes bytes from the peer, while not busy; what they complete is answered as far as the socket takes it.

        Raises:
            OSError: The connection is broken.
            FrameError: What came is no request.
        """
        raw = bytes(data)
        middle = middle_of(raw) if self._parser.empty else b""
        known = self._known.get(middle)
        if known is not None:
            if self._answer_unit(*known, raw):
                return
            del self._known[middle]
        request = self._parser.take(raw)
        if request is None:
            return
        if len(request.selector) > limits.LONG_SELECTOR_NBYTES:
            self.aside, self.busy = request, True
        elif not self._begin(request):
            self.turn()
        elif middle and not request.start and request.nbytes == len(raw):
            self._learn(middle, request)

    def open_aside(self) -> Serving | Fault:
        """Opens the long selector that has come in. Not for the serving thread."""
        return self._opened(self.aside.selector if self.aside is not None else b"")

    def begin_aside(self, opened: Serving | Fault) -> None:
        """It is open: its answer begins with the next turn."""
        request, self.aside = self.aside, None
        if request is not None:
            self._reset(request.id, request.start, request.stop)
            self._adopt(opened)

    def close(self) -> None:
        """Gives back the source's memory and closes the socket. Idempotent."""
        self._release()
        self.sock.close()

    def turn(self) -> None:
        """Sends up to a turn's bytes, and the END if those were the last ones.

        Raises:
            OSError: The connection is broken.
            FrameError: The next request, come in meanwhile, is none.
        """
        request, self._request = self._request, None
        if request is not None and self._begin(request):
            return
        try:
            self._turn()
        except BlockingIOError:
            return

    def _turn(self) -> None:
        self._turn_left = limits.TURN_NBYTES
        if self._chunk_left and self._serving is not None:  # else a header is due, or the END, with a check
            fault = self._serving.check()
            if fault is not None:
                self._blank(fault)
        while not self._ending:
            if self._iovecs.nbytes or self._chunk_left:
                self._send_chunk()
                if self._chunk_left or (self._fault is None and self._at < self._stop):
                    return
            self._begin_chunk()
        self._iovecs.send(self.fd, NO_WAIT)
        if not self._iovecs.nbytes:
            self._done()

    def _done(self) -> None:
        """A request that has come in already has to wait for its turn, like everybody."""
        self._request = self._parser.next()
        self.busy = self._request is not None

    # ---- requests ----------------------------------------------------------------------------------

    def _begin(self, request: Request) -> bool:
        """True: the whole answer is out."""
        self._reset(request.id, request.start, request.stop)
        small = 0 < request.stop - request.start <= NOW_NBYTES
        if small and len(request.selector) <= _NOW_SELECTOR_NBYTES:
            return self._answer_now(request.selector)
        self._open(request.selector)
        return False

    def _reset(self, request_id: int, start: int, stop: int) -> None:
        self._request_id, self._at, self._stop = request_id, start, stop
        self._chunk_left = self._head_left = self._sent = 0
        self._turn_left = limits.TURN_NBYTES
        self._fault, self._ending = None, False
        self._iovecs.clear()
        self.busy = True

    def _open(self, selector: bytes) -> None:
        """For an answer in turns."""
        self._adopt(self._opened(selector))

    def _opened(self, selector: bytes) -> Serving | Fault:
        try:
            return self._source.open(self.link.token, selector)
        except Exception as exc:
            return _bug(exc)

    def _adopt(self, opened: Serving | Fault) -> None:
        if isinstance(opened, Fault):
            self._fault = opened
            return
        self._serving = opened
        self._fault = self._beyond(opened.extents)

    def _beyond(self, extents: Extents) -> Fault | None:
        if self._stop <= extents.nbytes:
            return None
        text = f"bytes [{self._at}, {self._stop}) were asked for; the owner has {extents.nbytes}"
        return Fault(FaultKind.REFUSED, text, LLMStatusCode.LLM_PARAM_INVALID)

    def _release(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    # ---- answers at once -----------------------------------------------------------------------------

    def _answer_now(self, selector: bytes) -> bool:
        """Sends the whole answer with one call, if the socket takes it. True: it did."""
        try:
            refused = self._source.send_now(self.link.token, selector, self._send_whole)
        except Exception as exc:
            refused = _bug(exc)
        if refused is not None:
            self._fault = refused
            return False
        if self._is_out():
            return True
        if self._fault is None:
            self._go_on(selector)
        return False

    def _learn(self, middle: bytes, request: Request) -> None:
        """A reader that asks for one unit after another is answered with less ado."""
        units = self._source.units(self.link.token, request.selector)
        if units is None:
            return
        if len(self._known) >= limits.KNOWN_UNITS:
            self._known.clear()
        self._known[middle] = units, request.stop

    def _answer_unit(self, units: ServedUnits, nbytes: int, raw: bytes) -> bool:
        """Whether the request is taken: the units are what they were."""
        request_id, unit = unit_of(raw)
        self._reset(request_id, 0, nbytes)
        if not units.send_now(unit, self._send_whole):
            return False
        if not self._is_out():
            self._go_on(raw[REQUEST_NBYTES:])
            self.turn()
        return True

    def _is_out(self) -> bool:
        """Whether the whole answer was sent at once, which ends it."""
        if not self._sent or self._iovecs.nbytes:
            return False
        self.link.bytes_out += self._stop - self._at
        self._done()
        return True

    def _send_whole(self, extents: Extents) -> None:
        """Under the source's lock: what is sent here was valid when it was sent."""
        self._fault = self._beyond(extents)
        if self._fault is not None:
            return
        iovecs, nbytes = self._iovecs, self._stop - self._at
        put_whole(self._head.view, self._end.view, self._request_id, nbytes)
        iovecs.append(self._head.address, HEADER_NBYTES)
        if iovecs.load(extents, self._at, nbytes, spare=1) < nbytes:  # too many runs for one call
            return
        iovecs.append(self._end.address, HEADER_NBYTES)
        with contextlib.suppress(OSError):  # it comes again in the first turn
            self._sent = iovecs.send_now(self.fd)

    def _go_on(self, selector: bytes) -> None:
        """The socket was full in the middle of an answer sent at once: the rest goes out in turns."""
        nbytes = self._stop - self._at
        moved = min(max(0, self._sent - HEADER_NBYTES), nbytes)
        self.link.bytes_out += moved
        if self._sent >= HEADER_NBYTES + nbytes:  # the table holds the rest of the END
            self._ending = True
            return
        self._iovecs.clear()
        self._open(selector)
        if not self._sent:
            return
        self._at += moved
        self._chunk_left = nbytes - moved
        self._head_left = max(0, HEADER_NBYTES - self._sent)
        if self._head_left:
            self._iovecs.append(self._head.address + HEADER_NBYTES - self._head_left, self._head_left)
        if self._fault is not None:
            self._blank(self._fault)
        self._load()

    # ---- answers in turns ----------------------------------------------------------------------------

    def _begin_chunk(self) -> None:
        """Loads the header of the next chunk, or the END. Checks the source before either."""
        if self._fault is None and self._serving is not None:
            self._fault = self._serving.check()
        if self._fault is not None or self._at >= self._stop:
            self._begin_end()
            return
        self._chunk_left = min(CHUNK_NBYTES, self._stop - self._at)
        self._head.view[:HEADER_NBYTES] = encode_data(self._request_id, self._chunk_left)
        self._iovecs.append(self._head.address, HEADER_NBYTES)
        self._head_left = HEADER_NBYTES

    def _begin_end(self) -> None:
        fault = self._fault
        if fault is None:
            raw = encode_end(self._request_id, EndKind.OK)
        else:
            kind = EndKind.SOURCE if fault.kind is FaultKind.SOURCE else EndKind.REFUSED
            raw = encode_end(self._request_id, kind, fault.code, fault.text)
        self._release()
        self._head.view[: len(raw)] = raw
        self._iovecs.append(self._head.address, len(raw))
        self._ending = True

    def _send_chunk(self) -> None:
        """Sends what this turn may of the chunk. BlockingIOError: the socket takes no more for now."""
        while self._iovecs.nbytes or (self._chunk_left and self._turn_left):
            self._load()
            # The last bytes wait in the kernel for the END, so that a small answer is one packet.
            ends = not self._chunk_left and self._at >= self._stop
            try:
                sent = self._iovecs.send(self.fd, NO_WAIT | MORE if ends else NO_WAIT)
            except OSError as exc:
                if exc.errno != errno.EFAULT:
                    raise
                self._blank(Fault(FaultKind.SOURCE, self._unreadable(), LLMStatusCode.LLM_FAILED, exc))
                continue
            self.link.bytes_out += max(0, sent - self._head_left)
            self._head_left = max(0, self._head_left - sent)

    def _unreadable(self) -> str:
        """Which byte of those in the table stopped the kernel."""
        serving, at = self._serving, self._at - (self._iovecs.nbytes - self._head_left)
        where = "memory" if serving is None else serving.place_of(first_unreadable(serving.extents, at))
        return f"{where} of the owner is not readable (not mapped any more)"

    def _load(self) -> None:
        """Fills the table with runs of the chunk, once it has only the header, or nothing."""
        serving = self._serving
        if (
            serving is None
            or not min(self._chunk_left, self._turn_left)
            or self._iovecs.nbytes > self._head_left
        ):
            return
        nbytes = self._iovecs.load(serving.extents, self._at, min(self._chunk_left, self._turn_left))
        self._at += nbytes
        self._chunk_left -= nbytes
        self._turn_left -= nbytes

    def _blank(self, fault: Fault) -> None:
        """No more bytes to send: zeros for the rest of the chunk, if its header is on the way."""
        self._fault = fault
        blank = self._iovecs.nbytes - self._head_left + self._chunk_left
        self._iovecs.clear()
        self._chunk_left = 0
        if self._head_left == HEADER_NBYTES:
            self._head_left = 0
            return
        if self._head_left:
            self._iovecs.append(self._head.address + HEADER_NBYTES - self._head_left, self._head_left)
        while blank:
            piece = min(blank, len(_ZEROS.view))
            self._iovecs.append(_ZEROS.address, piece)
            blank -= piece


def _bug(exc: Exception) -> Fault:
    """A bug of ours in the source is an answer for the reader; the other peers go on."""
    logger.error("serving a read failed: %r", exc, exc_info=logger.isEnabledFor(logging.DEBUG))
    text = f"the owner failed: {type(exc).__name__}"
    return Fault(FaultKind.REFUSED, text, LLMStatusCode.LLM_FAILED)
