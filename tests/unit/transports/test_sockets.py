"""``sendmsg`` and ``recvmsg`` on iovec tables: exact resumption, and addresses that are not there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.transports._sockets import NO_WAIT, WAIT_ALL, Buffer, Iovecs


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.lists(st.integers(1, 60), max_size=40))
def test_resumption_is_exact_to_the_byte(lengths: list[int], pieces: list[int]) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    starts = np.cumsum([0, *lengths[:-1]]) + np.arange(len(lengths))  # a gap of one byte between runs
    expected = b"".join(data[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True))
    iovecs, got = Iovecs(), b""
    pairs = np.empty((len(lengths), 2), np.uint64)
    pairs[:, 0] = np.uint64(data.ctypes.data) + starts.astype(np.uint64)
    pairs[:, 1] = lengths
    iovecs.extend(pairs, len(expected))
    left, right = socket.socketpair()
    with left, right:
        for piece in pieces:
            if iovecs.nbytes <= piece:
                break
            # What a partial transfer does: some bytes went, the table moves on.
            got += expected[len(expected) - iovecs.nbytes :][:piece]
            iovecs.advance(piece)
        assert iovecs.nbytes == len(expected) - len(got)
        iovecs.send(left.fileno(), NO_WAIT)
        got += right.recv(2000)
    assert got == expected
    assert iovecs.nbytes == 0


def test_receive_scatters(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    first, second = Buffer(3), Buffer(4)
    iovecs = Iovecs()
    iovecs.append(first.address, 3)
    iovecs.append(second.address, 4)
    left.send(b"abcdefg")
    assert iovecs.receive(right.fileno(), WAIT_ALL) == 7
    assert bytes(first.view) + bytes(second.view) == b"abcdefg"


def test_end_of_stream_is_zero(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.close()
    buffer, iovecs = Buffer(3), Iovecs()
    iovecs.append(buffer.address, 3)
    assert iovecs.receive(right.fileno(), WAIT_ALL) == 0


@pytest.mark.parametrize("address", [0x1000, 2**64 - 4096], ids=["unmapped", "kernel"])
def test_a_bad_address_is_an_error_not_a_signal(
    pair: tuple[socket.socket, socket.socket], address: int
) -> None:
    left, right = pair
    left.send(b"x" * 8)
    iovecs = Iovecs()
    iovecs.append(address, 8)
    for call in (
        lambda: iovecs.send(right.fileno(), NO_WAIT),
        lambda: iovecs.receive(right.fileno(), NO_WAIT),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EFAULT
        assert iovecs.nbytes == 8


def test_sending_to_nobody_raises_and_sends_no_signal(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.close()
    buffer, iovecs = Buffer(8), Iovecs()
    iovecs.append(buffer.address, 8)
    with pytest.raises(BrokenPipeError):
        iovecs.send(left.fileno(), NO_WAIT)


def test_nothing_there_is_not_an_end(pair: tuple[socket.socket, socket.socket]) -> None:
    buffer, iovecs = Buffer(8), Iovecs()
    iovecs.append(buffer.address, 8)
    with pytest.raises(BlockingIOError):
        iovecs.receive(pair[0].fileno(), NO_WAIT)
