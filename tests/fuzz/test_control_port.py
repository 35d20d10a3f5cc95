"""Z3: whatever comes in at the listening port, the connection ends, the process does not and nobody notices."""

from __future__ import annotations

import logging
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from llm_datadist._link.seam import Address
from llm_datadist._wire.framing import Decoder, encode
from llm_datadist._wire.messages import Confirm, Identity, Welcome
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.links import Engine
from tests.support.raw_links import hello

ME = Identity(cluster_id=9, instance=b"r" * 16, role=1, accessible=False)
HELLO = b"".join(bytes(chunk) for chunk in encode(hello(1, ME)))
CONFIRM = b"".join(bytes(chunk) for chunk in encode(Confirm(reads_by=("x",))))

CRAFTED = {
    "length 2^63": struct.pack("<Q", 1 << 63),
    "length 2^32-1": struct.pack("<I", 2**32 - 1),
    "count 2^32-1": struct.pack("<III", 60, 10, 2**32 - 1),
    "negative sizes": struct.pack("<Iiii", 20, -1, 1, -1) + bytes(8),
    "nested 60,000 deep": struct.pack("<III", 60008, 60000, 0) + b"\x91" * 60000,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "array of 2^32": struct.pack("<III", 39, 31, 0)
    + b"\x82\xa1t\xa8Announce\xa7entries\xdd\xff\xff\xff\xff"
    + bytes(6),
}


@pytest.fixture
def linked(caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    """An engine with a good link, which must answer until the end."""
    caplog.set_level(logging.ERROR, logger="llm_datadist.link")
    with Engine(1) as a, Engine(2) as b:
        assert a.service.dial([b.target], 2) == [LLMStatusCode.LLM_SUCCESS]
        link = a.service.get(2)
        assert link is not None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield a
        a.service.ping(link, time.monotonic() + 2)
        assert len(a.service.links()) == 1 and a.notes.prepared == 1 + a.notes.discarded
        assert not a.notes.frames, "nothing of it reached the engine"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 16 << 10
        assert not caplog.records, "no error, no traceback"


def connect(address: Address) -> socket.socket:
    sock = socket.create_connection((address.host, address.port))
    sock.settimeout(3)
    return sock


def shake(sock: socket.socket) -> None:
    sock.sendall(HELLO)
    decoder = Decoder()
    while not (frames := decoder.feed(sock.recv(65536))):
        pass
    assert isinstance(frames[0].message, Welcome)


def ends(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_z3_crafted_frames_end_the_connection_at_once(linked: Engine, name: str, when: str) -> None:
    with connect(linked.address) as sock:
        if when == "in the middle":
            shake(sock)
        watch = Stopwatch()
        sock.sendall(CRAFTED[name])
        assert ends(sock)
        assert watch.within(0.5)


def test_z3_half_frames_and_sudden_ends(linked: Engine) -> None:
    for cut in range(0, len(HELLO), 7):
        with connect(linked.address) as sock:
            sock.sendall(HELLO[:cut])
    for cut in range(0, len(CONFIRM), 3):
        with connect(linked.address) as sock:
            shake(sock)
            sock.sendall(CONFIRM[:cut])
    assert linked.notes.wait_for(lambda: linked.notes.prepared == 1 + linked.notes.discarded)


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 400))


def random_frame(rng: random.Random) -> bytes:
    body = rng.randbytes(rng.randrange(0, 200))
    return struct.pack("<III", len(body) + 8, len(body), 0) + body


def damaged_hello(rng: random.Random) -> bytes:
    data = bytearray(HELLO)
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("make", [random_bytes, random_frame, damaged_hello], ids=lambda make: make.__name__)
def test_z3_random_input(linked: Engine, make: Callable[[random.Random], bytes]) -> None:
    rng = random.Random(make.__name__)
    for number in range(300):
        with connect(linked.address) as sock:
            if number % 3 == 0 and make is not damaged_hello:
                shake(sock)
            try:
                sock.sendall(make(rng))
                sock.shutdown(socket.SHUT_WR)
                assert ends(sock)
            except ConnectionError:
                continue
    assert linked.notes.wait_for(lambda: linked.notes.prepared == 1 + linked.notes.discarded)
