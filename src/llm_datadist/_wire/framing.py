"""Frames: a message and its raw attachments, length-prefixed. Pure: bytes in, frames out.

A frame is u32 total (of what follows it), u32 message length, u32 attachment count, a u32 length of each
attachment, the msgpack message, the attachments; all little-endian. Invariants: memory grows with the
bytes received, never with a length that is only claimed; bytes after the frame just taken are not looked
at, so that a connection can change hands after any frame. Not thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from llm_datadist._core import limits
from llm_datadist._wire.messages import AnyMessage, Message

Buffer: TypeAlias = bytes | bytearray | memoryview

_TOTAL = struct.Struct("<I")
_HEADER = struct.Struct("<II")
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The peer broke the protocol: its connection is closed, nothing else happens."""


class OversizeError(ValueError):
    """A message of ours is larger than a frame may be."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message and its attachments. ``nbytes``: that it had on the wire."""

    message: AnyMessage
    attachments: tuple[bytes, ...] = ()
    nbytes: int = field(default=0, compare=False)


def encode(message: Message, attachments: Sequence[Buffer] = ()) -> list[Buffer]:
    """A frame as chunks to be sent in this order, a long text cut. Attachments are not copied: leave them unchanged.

    Raises:
        OversizeError: More than the peer would take.
    """
    text = getattr(message, "text", "")
    if len(text) > limits.TEXT_CHARS:
        message = msgspec.structs.replace(message, text=text[: limits.TEXT_CHARS])
    body = _encoder.encode(message)
    views = [_bytes_of(a) for a in attachments]
    sizes = [len(v) for v in views]
    total = _HEADER.size + 4 * len(sizes) + len(body) + sum(sizes)
    if total > limits.FRAME_NBYTES or len(body) > limits.MESSAGE_NBYTES or len(sizes) > limits.ATTACHMENTS:
        raise OversizeError(
            f"{type(message).__name__} of {total} bytes with {len(sizes)} attachments: a frame holds "
            f"{limits.FRAME_NBYTES}, {limits.MESSAGE_NBYTES} of them message, and {limits.ATTACHMENTS} attachments; "
            "send it in parts"
        )
    head = struct.pack(f"<III{len(sizes)}I", total, len(body), len(sizes), *sizes) + body
    return [head, *(v for v in views if len(v))]


def _bytes_of(attachment: Buffer) -> bytes | memoryview:
    if isinstance(attachment, bytes):
        return attachment
    view = memoryview(attachment)
    return view.cast("B") if view.nbytes else b""  # a view with a 0 in its shape cannot be cast


class Decoder:
    """Takes bytes in any pieces, gives frames.

    Attributes:
        limit: Bytes that a frame may have; may be raised between frames.
    """

    def __init__(self, limit: int = limits.HANDSHAKE_FRAME_NBYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> list[Frame]:
        """Adds bytes and takes every frame that is complete.

        Raises:
            ProtocolError: See :meth:`take`.
        """
        self.push(data)
        frames = []
        while (frame := self.take()) is not None:
            frames.append(frame)
        return frames

    def push(self, data: Buffer) -> None:
        """Adds bytes without looking at them."""
        self._buffer += data

    def take(self) -> Frame | None:
        """The next frame, or None while it is incomplete.

        Raises:
            ProtocolError: Too long, its numbers do not add up, or not a message of ours.
        """
        have = len(self._buffer)
        if have < _TOTAL.size:
            return None
        (total,) = _TOTAL.unpack_from(self._buffer)
        if not _HEADER.size <= total <= self.limit:
            raise ProtocolError(f"a frame claims {total} bytes; {_HEADER.size} to {self.limit} are allowed")
        if have >= _TOTAL.size + _HEADER.size:
            _check_header(total, *_HEADER.unpack_from(self._buffer, _TOTAL.size))
        end = _TOTAL.size + total
        if have < end:
            return None
        with memoryview(self._buffer) as view:
            frame = _parse(view[_TOTAL.size : end])
        del self._buffer[:end]
        return frame

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes that were not taken yet."""
        return bool(self._buffer)

    @property
    def waiting_nbytes(self) -> int:
        """How many these are."""
        return len(self._buffer)

    def leftover(self) -> bytes:
        """The bytes not taken yet, which it forgets."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _check_header(total: int, message_nbytes: int, count: int) -> None:
    fits = _HEADER.size + 4 * count + message_nbytes <= total
    if not fits or count > limits.ATTACHMENTS or message_nbytes > limits.MESSAGE_NBYTES:
        raise ProtocolError(f"{total} bytes of frame, {message_nbytes} of message and {count} attachments")


def _parse(frame: memoryview) -> Frame:
    with frame:
        message_nbytes, count = _HEADER.unpack_from(frame)
        lists_end = _HEADER.size + 4 * count
        sizes = struct.unpack_from(f"<{count}I", frame, _HEADER.size)
        at = lists_end + message_nbytes
        if at + sum(sizes) != len(frame):
            raise ProtocolError(f"the parts of a frame of {len(frame)} bytes make {at + sum(sizes)}")
        message = _decode(frame[lists_end:at])
        attachments = []
        for size in sizes:
            attachments.append(bytes(frame[at : at + size]))
            at += size
        return Frame(message, tuple(attachments), len(frame))


def _decode(body: memoryview) -> AnyMessage:
    try:
        with body:
            return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"not a message of ours: {type(error).__name__}: {error}"[:300]) from error
