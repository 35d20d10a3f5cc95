"""What crosses a data connection: requests one way, chunks of the canonical stream the other. Pure.

A request is 32 bytes (magic, id, stream range, selector length) and the selector. An answer is chunks, each
a 16-byte header and as many bytes as it says, and an END header with a status and a short text. The id is in
every header: a stream that has lost its step is noticed at the next one.
Invariant: every number is checked here before anyone uses it; nothing is allocated because a header says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from llm_datadist._core import limits

CHUNK_NBYTES = 8 << 20  # what a reader takes with one call; zeros to its end if the source fails within it
STREAM_NBYTES = 1 << 62  # far above any cache; keeps sums of positions within int64

_REQUEST = struct.Struct("<4sIQQI4x")
_HEADER = struct.Struct("<2sBBIII")
_MIDDLE_AT = 8  # behind magic and id
_UNIT_NBYTES = 4
_REQUEST_MAGIC = b"LDr1"
_HEADER_MAGIC = b"LD"
_DATA, _END = 1, 2
FIRST_REQUEST = 1  # on each connection
REQUEST_NBYTES = _REQUEST.size
HEADER_NBYTES = _HEADER.size


class FrameError(Exception):
    """The other end broke the protocol; the text says how. Nothing to do but to close the connection."""


class EndKind(IntEnum):
    """How an answer ended."""

    OK = 0
    REFUSED = 1  # with a status code
    SOURCE = 2  # the owner's memory could not be read


class Request(msgspec.Struct, frozen=True):
    """Send me bytes [start, stop) of the stream that ``selector`` names."""

    id: int
    start: int
    stop: int
    selector: bytes

    @property
    def nbytes(self) -> int:
        """Of the request itself."""
        return REQUEST_NBYTES + len(self.selector)


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over; ``text_nbytes`` bytes of UTF-8 follow."""

    kind: EndKind
    code: int
    text_nbytes: int


def encode_request(request_id: int, start: int, stop: int, selector: bytes) -> bytes:
    """The head of a request; the selector follows it."""
    return _REQUEST.pack(_REQUEST_MAGIC, request_id, start, stop, len(selector))


class UnitRequests:
    """Requests that differ in nothing but the last four bytes of their selectors, the number of a unit.

    Args:
        head: What the selectors have in common.
        nbytes: Of each answer.
    """

    __slots__ = ("_middle", "_pack", "nbytes")

    def __init__(self, head: bytes, nbytes: int) -> None:
        self.nbytes = nbytes
        self._middle = _REQUEST.pack(b"", 0, 0, nbytes, len(head) + _UNIT_NBYTES)[_MIDDLE_AT:] + head
        self._pack = struct.Struct(f"<4sI{len(self._middle)}sI").pack

    def encode(self, request_id: int, unit: int) -> bytes:
        """A whole request, selector included."""
        return self._pack(_REQUEST_MAGIC, request_id, self._middle, unit)


def middle_of(raw: bytes) -> bytes:
    """What a request has in common with all others of the same ``UnitRequests``; empty for what is no request."""
    return raw[_MIDDLE_AT:-_UNIT_NBYTES] if raw.startswith(_REQUEST_MAGIC) else b""


def unit_of(raw: bytes) -> tuple[int, int]:
    """(request id, unit) of such a request."""
    return int.from_bytes(raw[4:_MIDDLE_AT], "little"), int.from_bytes(raw[-_UNIT_NBYTES:], "little")


def encode_data(request_id: int, nbytes: int) -> bytes:
    """The header of a chunk."""
    return _HEADER.pack(_HEADER_MAGIC, _DATA, 0, request_id, nbytes, 0)


def encode_end(request_id: int, kind: EndKind, code: int = 0, text: str = "") -> bytes:
    """An END with its text."""
    raw = text.encode("utf-8", "replace")[: limits.ANSWER_TEXT_NBYTES]
    return _HEADER.pack(_HEADER_MAGIC, _END, kind, request_id, len(raw), code & 0xFFFFFFFF) + raw


def put_whole(head: memoryview, end: memoryview, request_id: int, nbytes: int) -> None:
    """The header of an answer of one chunk, and the END behind it."""
    _HEADER.pack_into(head, 0, _HEADER_MAGIC, _DATA, 0, request_id, nbytes, 0)
    _HEADER.pack_into(end, 0, _HEADER_MAGIC, _END, 0, request_id, 0, 0)


def decode_header(raw: bytes | memoryview, request_id: int, most_nbytes: int) -> int | End:
    """Parses a header of an answer to ``request_id`` of which ``most_nbytes`` stream bytes are missing.

    Returns:
        The bytes of the stream that follow, or that none does.

    Raises:
        FrameError: It is not one, or what it says cannot be.
    """
    magic, what, kind, answered, nbytes, code = _HEADER.unpack(raw)
    if magic != _HEADER_MAGIC:
        raise FrameError("no chunk header where one must be")
    if answered != request_id:
        raise FrameError(f"an answer to request {answered} where request {request_id} was asked")
    if what == _DATA:
        most = min(CHUNK_NBYTES, most_nbytes)
        if not 0 < nbytes <= most:
            raise FrameError(f"a chunk of {nbytes} bytes where 1 to {most} can come")
        return int(nbytes)
    if what != _END or kind not in _END_KINDS or nbytes > limits.ANSWER_TEXT_NBYTES:
        raise FrameError(f"a header of kind {what}, status {kind}, {nbytes} bytes of text")
    if kind == EndKind.OK and most_nbytes:
        raise FrameError(f"the end of the answer with {most_nbytes} bytes missing")
    return End(EndKind(kind), code, nbytes) if kind or code or nbytes else _OK


_END_KINDS = frozenset(map(int, EndKind))
_OK = End(EndKind.OK, 0, 0)


class RequestParser:
    """Requests out of whatever pieces the bytes come in."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether no part of a request is waiting for the rest."""
        return not self._buffer

    @property
    def claimed(self) -> int:
        """Bytes of the selector of the request that is coming in, as it says; 0 when that is not known."""
        if not self._buffer or len(self._buffer) < REQUEST_NBYTES:
            return 0
        return int(_REQUEST.unpack_from(self._buffer)[-1])

    def feed(self, data: bytes | memoryview) -> None:
        """Takes bytes as they arrived."""
        self._buffer += data

    def next(self) -> Request | None:
        """The next complete request, if there is one.

        Raises:
            FrameError: What was fed is not a request.
        """
        if not self._buffer:
            return None
        request = _parse(self._buffer)
        if request is not None:
            del self._buffer[: request.nbytes]
        return request

    def take(self, data: bytes | memoryview) -> Request | None:
        """``feed`` and ``next`` in one: a whole request, which is the rule, is parsed where it lies."""
        if self._buffer:
            self.feed(data)
            return self.next()
        request = _parse(data)
        used = request.nbytes if request is not None else 0
        if used < len(data):
            self._buffer += data[used:]
        return request


def _parse(raw: bytes | bytearray | memoryview) -> Request | None:
    if len(raw) < REQUEST_NBYTES:
        return None
    magic, request_id, start, stop, selector_nbytes = _REQUEST.unpack_from(raw)
    if magic != _REQUEST_MAGIC:
        raise FrameError("no request where one must be")
    if not start <= stop <= STREAM_NBYTES:
        raise FrameError(f"a request for the bytes [{start}, {stop})")
    if selector_nbytes > limits.SELECTOR_NBYTES:
        raise FrameError(f"a selector of {selector_nbytes} bytes; the limit is {limits.SELECTOR_NBYTES}")
    whole = REQUEST_NBYTES + selector_nbytes
    if len(raw) < whole:
        return None
    return Request(request_id, start, stop, bytes(raw[REQUEST_NBYTES:whole]))
