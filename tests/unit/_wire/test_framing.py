"""Frames: what is encoded comes out again; what does not add up is refused before memory is spent."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._wire.framing import Decoder, OversizeError, ProtocolError, encode
from llm_datadist._wire.messages import Finish, Heartbeat, Ping


def raw(
    body: bytes, sizes: list[int], attachments: bytes, *, total: int | None = None, count: int | None = None
) -> bytes:
    rest = struct.pack(f"<II{len(sizes)}I", len(body), len(sizes) if count is None else count, *sizes)
    rest += body + attachments
    return struct.pack("<I", len(rest) if total is None else total) + rest


PING = b"".join(encode(Ping(id=7)))
PING_BODY = PING[12:]


def test_a_frame_keeps_message_and_attachments() -> None:
    indices = np.arange(5, dtype=np.uint64)
    data = b"".join(encode(Ping(id=7), [b"", indices.data, bytearray(b"ab"), np.empty(0, np.uint64).data]))
    (frame,) = Decoder().feed(data)
    assert frame.message == Ping(id=7)
    assert frame.attachments == (b"", indices.tobytes(), b"ab", b"")


def test_attachments_are_not_copied_when_encoded() -> None:
    block = bytearray(1 << 20)
    chunks = encode(Ping(id=1), [block])
    assert isinstance(chunks[1], memoryview) and chunks[1].obj is block


def test_the_bytes_after_a_frame_are_not_looked_at() -> None:
    decoder = Decoder()
    decoder.push(PING + b"\xff" * 20)
    frame = decoder.take()
    assert frame is not None and frame.message == Ping(id=7)
    assert decoder.leftover() == b"\xff" * 20
    assert decoder.leftover() == b""


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 7),
        struct.pack("<I", limits.HANDSHAKE_FRAME_NBYTES + 1),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<III", 100, 1, 2**32 - 1),
        struct.pack("<III", 100, 2**32 - 1, 0),
        struct.pack("<III", 100, 93, 0),
        raw(PING_BODY, [5], b"1234"),
        raw(PING_BODY, [3], b"1234"),
        raw(PING_BODY, [2**32 - 1], b"1234"),
        raw(PING_BODY[:-1], [], b""),
        raw(PING_BODY + b"\x00", [], b""),
        raw(b"", [], b""),
        raw(b"\x81\xa1t\xa7Nothing", [], b""),
        raw(b"\x82\xa1t\xa4Ping\xa2id\xa1x", [], b""),
        raw(b"\x91" * 60000, [], b""),
        raw(b"\x83\xa1t\xa4Ping\xa2id\x01\xa1z" + b"\x91" * 60000, [], b""),
        raw(b"\x82\xa1t\xa8Announce\xa7entries\xdd\xff\xff\xff\xff", [], b""),
        raw(b"\x82\xa1t\xa3Bye\xa4text\xdb\xff\xff\xff\xffx", [], b""),
        raw(b"\x82\xa1t\xa3Bye\xa4text\xa2\xff\xfe", [], b""),
    ],
)
def test_z3_what_does_not_add_up_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(data)


def test_z3_a_claimed_length_costs_no_memory() -> None:
    decoder = Decoder(limits.FRAME_NBYTES)
    decoder.push(struct.pack("<III", limits.FRAME_NBYTES, 10, 0))
    assert decoder.take() is None
    assert len(decoder.leftover()) == 12


def test_more_attachments_than_allowed_are_refused_early() -> None:
    decoder = Decoder(limits.FRAME_NBYTES)
    with pytest.raises(ProtocolError, match="attachments"):
        decoder.feed(struct.pack("<III", 1 << 20, 10, limits.ATTACHMENTS + 1))


def test_the_limit_holds_until_it_is_raised() -> None:
    data = b"".join(encode(Ping(id=1), [bytes(limits.HANDSHAKE_FRAME_NBYTES)]))
    with pytest.raises(ProtocolError, match="are allowed"):
        Decoder().feed(data)
    (frame,) = Decoder(limits.FRAME_NBYTES).feed(data)
    assert len(frame.attachments[0]) == limits.HANDSHAKE_FRAME_NBYTES


@pytest.mark.parametrize(
    ("message", "attachments"),
    [
        (Finish(id=1, notify=("", bytes(limits.MESSAGE_NBYTES))), []),
        (Ping(id=1), [bytes(limits.FRAME_NBYTES)]),
        (Heartbeat(), [b""] * (limits.ATTACHMENTS + 1)),
    ],
    ids=["message", "frame", "count"],
)
def test_our_own_oversize_is_told_to_the_caller(
    message: Finish | Heartbeat | Ping, attachments: list[bytes]
) -> None:
    with pytest.raises(OversizeError, match="in parts"):
        encode(message, attachments)
