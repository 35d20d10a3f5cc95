"""One connection on which a peer reads: requests in, answers out, a turn at a time.

Strategy: bytes go from the owner's memory into the socket with ``sendmsg``; the END is sent only after the
source has been checked once more, so what a reader accepts was valid to the last byte. Memory that turns out
unreadable in mid-chunk is answered with zeros and a fault, which keeps the connection in step.
Threads: everything here runs on the serving thread. Nothing blocks.
"""

from __future__ import annotations

import errno
import logging
import socket
from typing import Protocol

from llm_datadist.status import LLMStatusCode
from llm_datadist.transports._sockets import MORE, NO_WAIT, Buffer, Iovecs
from llm_datadist.transports.seam import Fault, FaultKind, ReadSource, Serving
from llm_datadist.transports.tcp_frames import (
    CHUNK_NBYTES,
    HEADER_NBYTES,
    TEXT_NBYTES,
    EndKind,
    Request,
    RequestParser,
    encode_data,
    encode_end,
)

logger = logging.getLogger("llm_datadist.tcp")

_ZEROS = Buffer(64 << 10)


class ServedLink(Protocol):
    """The link that a connection belongs to."""

    token: bytes
    bytes_out: int


class ServedConnection:
    """The state of one serving connection."""

    def __init__(self, sock: socket.socket, link: ServedLink, source: ReadSource) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.link = link
        self.wants_write = False  # what the serving thread has registered
        self._source = source
        self._parser = RequestParser()
        self._iovecs = Iovecs()
        self._head = Buffer(HEADER_NBYTES + TEXT_NBYTES)
        self._serving: Serving | None = None
        self._busy = False
        self._request_id = 0
        self._at = self._stop = 0  # stream positions: the next byte to load, the end
        self._chunk_left = 0  # bytes of the current chunk that are not loaded yet
        self._head_left = 0  # bytes of the current chunk's header that are not sent yet
        self._fault: Fault | None = None
        self._ending = False

    @property
    def busy(self) -> bool:
        """Whether an answer is under way: the connection waits to be written, not read."""
        return self._busy

    def feed(self, data: bytes | memoryview) -> None:
        """Takes bytes from the peer. Raises FrameError."""
        self._parser.feed(data)
        self._next_request()

    def close(self) -> None:
        """Gives back the source's memory and closes the socket. Idempotent."""
        self._release()
        self.sock.close()

    def turn(self) -> None:
        """Sends up to one chunk, and the END if that was the last one.

        Raises:
            OSError: The connection is broken.
            FrameError: The next request, come in meanwhile, is none.
        """
        try:
            self._turn()
        except BlockingIOError:
            return

    def _turn(self) -> None:
        if not self._iovecs.nbytes and not self._ending:
            self._begin_chunk()
        while not self._ending:
            self._send_chunk()
            if self._fault is None and self._at < self._stop:
                return
            self._begin_chunk()
        self._iovecs.send(self.fd, NO_WAIT)
        if not self._iovecs.nbytes:
            self._busy = False
            self._next_request()

    # ---- requests ----------------------------------------------------------------------------------

    def _next_request(self) -> None:
        if self._busy:
            return
        request = self._parser.next()
        if request is not None:
            self._busy = True
            self._begin(request)

    def _begin(self, request: Request) -> None:
        self._request_id, self._at, self._stop = request.id, request.start, request.stop
        self._chunk_left = self._head_left = 0
        self._fault, self._ending = None, False
        self._iovecs.clear()
        try:
            opened = self._source.open(self.link.token, request.selector)
        except Exception as exc:  # a bug of ours: the reader gets an answer, the other peers go on
            logger.error("serving a read failed: %r", exc, exc_info=logger.isEnabledFor(logging.DEBUG))
            opened = Fault(
                FaultKind.REFUSED, f"the owner failed: {type(exc).__name__}", LLMStatusCode.LLM_FAILED
            )
        if isinstance(opened, Fault):
            self._fault = opened
            return
        self._serving = opened
        if request.stop > opened.extents.nbytes:
            owned = opened.extents.nbytes
            text = f"bytes [{request.start}, {request.stop}) were asked for; the owner has {owned}"
            self._fault = Fault(FaultKind.REFUSED, text, LLMStatusCode.LLM_PARAM_INVALID)

    def _release(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    # ---- answers -----------------------------------------------------------------------------------

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
        """Sends the rest of the chunk. BlockingIOError: the socket takes no more for now."""
        while self._iovecs.nbytes or self._chunk_left:
            self._load()
            # The last bytes wait in the kernel for the END, so that a small answer is one packet.
            ends = not self._chunk_left and self._at >= self._stop
            try:
                sent = self._iovecs.send(self.fd, NO_WAIT | MORE if ends else NO_WAIT)
            except OSError as exc:
                if exc.errno != errno.EFAULT:
                    raise
                self._blank(exc)
                continue
            self.link.bytes_out += max(0, sent - self._head_left)
            self._head_left = max(0, self._head_left - sent)

    def _load(self) -> None:
        """Fills the table with runs of the chunk, once it has only the header, or nothing."""
        serving = self._serving
        if serving is None or not self._chunk_left or self._iovecs.nbytes > self._head_left:
            return
        pairs, nbytes = serving.extents.take_pairs(self._at, self._chunk_left, self._iovecs.room)
        self._iovecs.extend(pairs, nbytes)
        self._at += nbytes
        self._chunk_left -= nbytes

    def _blank(self, cause: OSError) -> None:
        """The memory cannot be read: zeros for the rest of the chunk, if its header is on the way."""
        text = "the owner's memory is not readable (not mapped any more)"
        self._fault = Fault(FaultKind.SOURCE, text, LLMStatusCode.LLM_FAILED, cause)
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
