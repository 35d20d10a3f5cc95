"""The TCP transport with both ends in one process: right bytes, refusals and faults."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.owner import Memory
from llm_datadist.transports import tcp_channel
from llm_datadist.transports._sockets import NOW_NBYTES
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint
from llm_datadist.transports.tcp import TcpTransport
from llm_datadist.transports.tcp_frames import CHUNK_NBYTES, encode_data
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support.tcp_rig import (
    CALL_S,
    MakeRig,
    Rig,
    Trickle,
    extents_of,
    in_thread,
    memory_of,
)
from tests.support.world import wait_until


@pytest.mark.parametrize("reader_dials", [True, False])
@pytest.mark.parametrize("block_nbytes", [1, 7, 4096, 65537])
def test_blocks_arrive_and_nothing_else_changes(
    make_rig: MakeRig, reader_dials: bool, block_nbytes: int
) -> None:
    rig = make_rig(reader_dials=reader_dials)
    rng = np.random.default_rng(block_nbytes)
    source, destination = memory_of(3, 40 * block_nbytes, 1), memory_of(3, 50 * block_nbytes, None)
    theirs, ours = rng.permutation(40)[:30].tolist(), rng.permutation(50)[:30].tolist()
    expected = destination.copy()
    for tensor in range(3):
        blocks = expected[tensor].reshape(50, block_nbytes)
        blocks[ours] = source[tensor].reshape(40, block_nbytes)[theirs]
    progress = rig.read(extents_of(source, theirs, block_nbytes), extents_of(destination, ours, block_nbytes))
    assert (progress.nbytes, progress.fault) == (3 * 30 * block_nbytes, None)
    assert np.array_equal(destination, expected)
    assert rig.channel.bytes_in == rig.owner_channel.bytes_out == progress.nbytes


def test_more_runs_than_one_call_takes(rig: Rig) -> None:
    source, destination = memory_of(2, 9000, 1), memory_of(2, 9000, None)
    evens = list(range(0, 9000, 2))
    assert rig.read(extents_of(source, evens, 1), extents_of(destination, evens, 1)).fault is None
    assert np.array_equal(destination[:, ::2], source[:, ::2])
    assert (destination[:, 1::2] == 0xA5).all()


@pytest.mark.parametrize("size", [CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, 3 * CHUNK_NBYTES + 5])
def test_sizes_around_a_turn(rig: Rig, size: int) -> None:
    source, destination = memory_of(1, size, 1), memory_of(1, size, None)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)


def test_nothing_to_read_makes_no_traffic(rig: Rig) -> None:
    nothing = extents_of(memory_of(1, 4, 1), [], 4)
    assert rig.read(nothing, nothing) == tcp_channel.Progress(0)
    assert not rig.channel.pool.sockets()


def test_a_long_selector(rig: Rig) -> None:
    source, destination = memory_of(1, 1 << 20, 1), memory_of(1, 1 << 20, None)
    blocks = list(range(0, 1 << 18, 2))
    progress = rig.read(extents_of(source, blocks, 4), extents_of(destination, blocks, 4))
    assert progress.fault is None
    assert np.array_equal(destination.reshape(-1, 4)[::2], source.reshape(-1, 4)[::2])


def test_wide_plans_are_striped_small_ones_are_not(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    rig = make_rig(stripes=3)
    source, destination = memory_of(3, (1 << 20) + 5, 1), memory_of(3, (1 << 20) + 5, None)
    small = memory_of(1, 100, None)
    seen: list[tuple[int, int]] = []
    whole = ReadingConnection.read

    def note(
        self: ReadingConnection, selector: bytes, into: Extents, start: int, stop: int, by: float
    ) -> Any:
        seen.append((start, stop))
        return whole(self, selector, into, start, stop, by)

    monkeypatch.setattr(ReadingConnection, "read", note)
    assert rig.read(extents_of(source[:1, :100]), extents_of(small)).fault is None
    progress = rig.read(extents_of(source), extents_of(destination))
    assert (progress.fault, progress.nbytes) == (None, source.size)
    third = source.size // 3
    assert sorted(seen) == [(0, 100), (0, third), (third, 2 * third), (2 * third, source.size)]
    assert np.array_equal(source, destination)


# ---- refusals and faults ---------------------------------------------------------------------------------


def test_a_refusal_comes_before_any_byte_and_the_connection_stays(rig: Rig) -> None:
    source, destination = memory_of(1, 5000, 1), memory_of(1, 5000, None)
    rig.source.refusal = Fault(FaultKind.REFUSED, "cache 7 is gone", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    progress = rig.read(extents_of(source), extents_of(destination))
    assert progress.nbytes == 0 and progress.fault is not None
    assert (progress.fault.kind, progress.fault.code) == (FaultKind.REFUSED, 0x5010B002)
    assert progress.fault.text == "cache 7 is gone"
    assert (destination == 0xA5).all()
    (kept,) = rig.channel.pool.sockets()
    rig.source.refusal = None
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert rig.channel.pool.sockets() == [kept]


@pytest.mark.parametrize("size, checks", [(NOW_NBYTES, 1), (NOW_NBYTES + 1, 2)], ids=["at once", "in turns"])
def test_the_source_is_checked_before_the_first_byte_and_after_the_last_one_of_what_takes_turns(
    rig: Rig, size: int, checks: int
) -> None:
    source, destination = memory_of(1, size, 1), memory_of(1, size, None)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert rig.source.checks == checks
    stale = Fault(FaultKind.REFUSED, "stale", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    rig.source.refusal_after_opening = stale
    fresh = memory_of(1, size, None)
    progress = rig.read(extents_of(source), extents_of(fresh))
    assert progress.fault == stale
    assert (fresh == 0xA5).all()


def test_memory_withdrawn_during_the_answer_is_noticed_at_its_end(rig: Rig) -> None:
    size = NOW_NBYTES + 1
    source, destination = memory_of(1, size, 1), memory_of(1, size, None)
    stale = Fault(FaultKind.REFUSED, "stale", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    real = rig.source.open

    def open_once(token: bytes, selector: bytes) -> object:
        serving = real(token, selector)
        answers = iter([None, stale])
        serving.check = lambda: next(answers)  # type: ignore[union-attr,method-assign]
        return serving

    rig.source.open = open_once  # type: ignore[method-assign,assignment]
    progress = rig.read(extents_of(source), extents_of(destination))
    assert (progress.nbytes, progress.fault) == (size, stale)
    assert rig.source.open_count == 0


def test_more_than_the_owner_has_is_refused(rig: Rig) -> None:
    destination = memory_of(1, 5000, None)
    progress = rig.read(extents_of(memory_of(1, 4999, 1)), extents_of(destination))
    assert progress.fault is not None and progress.fault.code == LLMStatusCode.LLM_PARAM_INVALID
    assert "4999" in progress.fault.text
    assert (destination == 0xA5).all()


def test_a_source_that_raises_is_an_answer(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.source.open = lambda token, selector: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    memory = memory_of(1, 10, 1)
    progress = rig.read(extents_of(memory), extents_of(memory_of(1, 10, None)))
    assert progress.fault is not None and progress.fault.code == LLMStatusCode.LLM_FAILED
    assert [r.name for r in caplog.records if r.levelno == logging.ERROR] == ["llm_datadist.tcp"]
    assert all(r.exc_info in (None, False) for r in caplog.records)


@pytest.mark.parametrize(
    "first_bad",
    [0, 500_000, (1 << 20) + 8192, (2 << 20) + 800_000, 3 << 20],
    ids=["at once", "in the first chunk", "early in a chunk", "late in a chunk", "where a chunk begins"],
)
def test_unreadable_source_memory_keeps_the_connection(rig: Rig, first_bad: int) -> None:
    memory, size = Memory(), 4 << 20
    base = memory.map_sparse(size)
    page = first_bad // 4096 * 4096
    memory.protect(base + page, 4096, "")
    destination = memory_of(1, size, None)
    whole = extents_of(destination)
    source = Extents.of(np.array([base], np.uint64), whole.offsets, whole.lengths)
    progress = rig.read(source, extents_of(destination))
    assert progress.fault is not None
    assert (progress.fault.kind, progress.fault.code) == (FaultKind.SOURCE, LLMStatusCode.LLM_FAILED)
    assert progress.fault.text.startswith(f"byte {page} of the stream of the owner is not readable")
    (kept,) = rig.channel.pool.sockets()
    good = memory_of(1, size, 1)
    assert rig.read(extents_of(good), extents_of(destination)).fault is None
    assert np.array_equal(good, destination)
    assert rig.channel.pool.sockets() == [kept]
    memory.close()


def test_an_unwritable_destination_is_told_and_the_next_read_works(rig: Rig) -> None:
    memory, size = Memory(), 1 << 20
    base = memory.map_sparse(size)
    memory.protect(base + size // 2, 4096, "r")
    source = memory_of(1, size, 1)
    whole = extents_of(source)
    bad = Extents.of(np.array([base], np.uint64), whole.offsets, whole.lengths)
    progress = rig.read(whole, bad)
    assert progress.fault is not None and progress.fault.kind is FaultKind.DESTINATION
    assert memory.read(base + size // 2, 4096) == bytes(4096)
    destination = memory_of(1, size, None)
    assert rig.read(whole, extents_of(destination)).fault is None
    assert np.array_equal(source, destination)
    assert wait_until(lambda: rig.source.open_count == 0, CALL_S)
    memory.close()


def test_nobody_listens(reader: TcpTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    channel = reader.open(PeerEndpoint(1, b"", b"t" * 16, address, lambda n: None), deadline=0)
    progress = channel.read(Segments(b"x", extents_of(memory_of(1, 8, None)))).wait(
        deadline=time.monotonic() + 5
    )
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST
    assert "refused" in progress.fault.text and str(address[1]) in progress.fault.text


def test_a_plan_with_addresses_is_a_mistake_of_the_caller(rig: Rig) -> None:
    extents = extents_of(memory_of(1, 8, 1))
    with pytest.raises(TypeError, match="selector"):
        rig.channel.read(Segments(extents, extents))


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", encode_data(1, CHUNK_NBYTES), encode_data(2, 8)],
    ids=["foreign", "too much", "another request"],
)
def test_an_owner_that_breaks_the_protocol(
    reader: TcpTransport, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Trickle(answer)
    destination = memory_of(1, 5000, None)
    progress = (
        owner.open(reader).read(Segments(b"x", extents_of(destination))).wait(deadline=time.monotonic() + 5)
    )
    owner.close()
    assert progress.fault is not None and progress.fault.kind is FaultKind.CHANNEL
    assert "protocol" in progress.fault.text
    assert [(r.name, r.levelname) for r in caplog.records] == [("llm_datadist.tcp", "WARNING")]
    assert (destination == 0xA5).all()


def test_an_owner_that_hangs_up_in_the_middle(reader: TcpTransport) -> None:
    owner = Trickle(encode_data(1, 5000), b"x" * 100)
    destination = memory_of(1, 5000, None)
    read = owner.open(reader).read(Segments(b"x", extents_of(destination)))
    result = in_thread(lambda: read.wait(deadline=time.monotonic() + 5))
    assert wait_until(lambda: destination[0, 99] == ord("x"), CALL_S)
    owner.hang_up()
    progress = result()
    owner.close()
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST
    assert progress.nbytes == 100
