"""Framing: any split of the stream gives the same frames; no input gives anything but frames or ProtocolError."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._wire.framing import Decoder, Frame, ProtocolError, encode
from llm_datadist._wire.messages import Bye, Message, Ping, Refused

MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ping, id=st.integers(0, 2**64 - 1)),
    st.builds(Bye, text=st.text(max_size=20)),
    st.builds(Refused, code=st.integers(0, 2**32), text=st.text(max_size=20), kind=st.text(max_size=20)),
)
FRAMES = st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=40), max_size=4)), max_size=5)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_frames_survive_any_split(frames: list[tuple[Message, list[bytes]]], cuts: list[int]) -> None:
    data = b"".join(b"".join(encode(message, attachments)) for message, attachments in frames)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder, got = Decoder(), []
    for start, stop in itertools.pairwise(edges):
        got += decoder.feed(data[start:stop])
    assert [(f.message, list(f.attachments)) for f in got] == frames
    assert decoder.leftover() == b""


@given(
    frames=FRAMES,
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_z3_a_damaged_stream_gives_frames_or_a_protocol_error(
    frames: list[tuple[Message, list[bytes]]], flips: list[tuple[int, int]]
) -> None:
    data = bytearray(b"".join(b"".join(encode(message, attachments)) for message, attachments in frames))
    for at, mask in flips:
        if data:
            data[at % len(data)] ^= mask
    _feed(bytes(data))


@given(data=st.binary(max_size=300))
def test_z3_random_bytes_give_frames_or_a_protocol_error(data: bytes) -> None:
    _feed(data)
    _feed(len(data).to_bytes(4, "little") + data)


def _feed(data: bytes) -> None:
    try:
        assert all(isinstance(frame, Frame) for frame in Decoder().feed(data))
    except ProtocolError:
        return
