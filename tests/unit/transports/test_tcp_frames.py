"""Frames of a data connection: what is sent can be parsed, and nothing else is believed."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._core import limits
from llm_datadist._core.limits import ANSWER_TEXT_NBYTES
from llm_datadist.transports.tcp_frames import (
    CHUNK_NBYTES,
    HEADER_NBYTES,
    End,
    EndKind,
    FrameError,
    Request,
    RequestParser,
    decode_header,
    encode_data,
    encode_end,
    encode_request,
)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**62), st.binary(max_size=50)), max_size=5),
    st.data(),
)
def test_requests_come_out_as_they_went_in_whatever_the_pieces(
    requests: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(encode_request(i, 0, stop, sel) + sel for i, stop, sel in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parser, parsed = RequestParser(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        parser.feed(stream[begin:end])
        while (request := parser.next()) is not None:
            parsed.append(request)
    assert parsed == [Request(i, 0, stop, sel) for i, stop, sel in requests]


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        bytes(32),
        struct.pack("<4sIQQI4x", b"LDr1", 1, 5, 4, 0),
        struct.pack("<4sIQQI4x", b"LDr1", 1, 0, 2**63, 0),
        struct.pack("<4sIQQI4x", b"LDr1", 1, 0, 4, limits.SELECTOR_NBYTES + 1),
        struct.pack("<4sIQQI4x", b"LDr1", 1, 0, 4, 2**32 - 1),
    ],
)
def test_what_is_not_a_request_is_refused_at_its_header(raw: bytes) -> None:
    parser = RequestParser()
    parser.feed(raw)
    with pytest.raises(FrameError):
        parser.next()


def test_a_selector_takes_memory_only_as_it_arrives() -> None:
    parser = RequestParser()
    tracemalloc.start()
    parser.feed(struct.pack("<4sIQQI4x", b"LDr1", 1, 0, 4, limits.SELECTOR_NBYTES))
    assert parser.next() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_headers_of_an_answer() -> None:
    assert decode_header(encode_data(7, 100), 7, 100) == 100
    raw = encode_end(7, EndKind.REFUSED, 0xFFFFFFFF, "gone")
    assert decode_header(raw[:HEADER_NBYTES], 7, 100) == End(EndKind.REFUSED, 0xFFFFFFFF, 4)
    assert raw[HEADER_NBYTES:] == b"gone"
    assert decode_header(encode_end(7, EndKind.OK), 7, 0) == End(EndKind.OK, 0, 0)


def test_a_long_text_is_cut() -> None:
    assert len(encode_end(1, EndKind.SOURCE, 1, "x" * 5000)) == HEADER_NBYTES + ANSWER_TEXT_NBYTES


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (encode_data(8, 100), "request 8"),
        (encode_data(7, 101), "chunk of 101"),
        (encode_data(7, 0), "chunk of 0"),
        (b"XX" + encode_data(7, 100)[2:], "no chunk header"),
        (encode_end(7, EndKind.OK), "100 bytes missing"),
        (struct.pack("<2sBBIII", b"LD", 2, 9, 7, 0, 0), "status 9"),
        (struct.pack("<2sBBIII", b"LD", 2, 1, 7, ANSWER_TEXT_NBYTES + 1, 0), "bytes of text"),
        (struct.pack("<2sBBIII", b"LD", 3, 0, 7, 0, 0), "kind 3"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(raw: bytes, rule: str) -> None:
    with pytest.raises(FrameError, match=rule):
        decode_header(raw[:HEADER_NBYTES], 7, 100)


def test_a_chunk_is_never_larger_than_a_turn() -> None:
    with pytest.raises(FrameError):
        decode_header(encode_data(7, CHUNK_NBYTES + 1), 7, 1 << 40)


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_random_headers_raise_nothing_but_a_frame_error(raw: bytes) -> None:
    try:
        header = decode_header(raw, 7, 100)
    except FrameError:
        return
    assert isinstance(header, (int, End))
