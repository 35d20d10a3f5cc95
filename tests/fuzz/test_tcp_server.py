"""Random bytes at the serving side: the connection is closed, nothing else notices, nothing grows."""

from __future__ import annotations

import logging
import random
import resource
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist.testing.stream_owner import encode_extents, first_frame
from llm_datadist.transports.tcp_frames import encode_request
from tests.support.tcp_rig import CALL_S, Rig, extents_of, free_memory, memory_of
from tests.support.world import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()
    free_memory()


def attack(rig: Rig, data: bytes) -> socket.socket:
    sock = socket.create_connection(rig.port.address, timeout=CALL_S)
    sock.sendall(first_frame(rig.token, True) + data)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 64,
        b"\xff" * 64,
        encode_request(1, 5, 4, b""),
        encode_request(1, 0, 2**63, b""),
        encode_request(1, 0, 4, b"")[:24] + b"\xff" * 8,
    ],
)
def test_a_connection_that_breaks_the_rules_is_closed_and_logged_once(
    rig: Rig, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with attack(rig, data) as sock:
        assert is_closed(sock)
    assert [(r.name, r.levelname) for r in caplog.records] == [("llm_datadist.tcp", "WARNING")]
    assert caplog.records[0].exc_info is None


def test_random_bytes_disturb_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    chaos = random.Random(7)
    source, destination = memory_of(1, 100_000, 1), memory_of(1, 100_000, None)
    good = encode_request(1, 0, 100_000, encode_extents(extents_of(source))) + encode_extents(
        extents_of(source)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(300):
        data = bytearray(good if turn % 2 else chaos.randbytes(chaos.randrange(200)))
        if turn % 2:  # a good request with some bytes of its header changed, or cut short
            for _ in range(chaos.randrange(1, 4)):
                data[chaos.randrange(32)] = chaos.randrange(256)
            del data[chaos.randrange(1, len(data)) :]
        with attack(rig, bytes(data)):
            if turn % 10 == 0:
                assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)
    assert wait_until(lambda: rig.source.open_count == 0 and len(rig.owner._server._connections) == 1, CALL_S)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
    assert not caplog.records


def test_selectors_of_nonsense_get_an_answer(rig: Rig) -> None:
    """The source refuses it; the connection goes on."""
    with attack(rig, encode_request(1, 0, 4, b"nonsense") + b"nonsense") as sock:
        assert b"no selector" in sock.recv(1000)
        good = encode_extents(extents_of(memory_of(1, 8, 1)))
        sock.sendall(encode_request(2, 0, 8, good) + good)
        assert sock.recv(2) == b"LD"


def test_one_link_cannot_take_all_descriptors(rig: Rig) -> None:
    socks = [attack(rig, b"") for _ in range(70)]
    try:
        assert all(is_closed(sock) for sock in socks[64:])
        assert len(rig.owner._server._connections) == 64
    finally:
        for sock in socks:
            sock.close()
