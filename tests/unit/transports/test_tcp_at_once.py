"""Small answers over TCP, which go out with one call: cut short at any byte, or refused meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist._core.limits import TURN_NBYTES
from llm_datadist.status import LLMStatusCode
from llm_datadist.transports import _sockets, tcp_channel
from llm_datadist.transports._sockets import NOW_NBYTES, Iovecs
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_frames import CHUNK_NBYTES, HEADER_NBYTES
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support.tcp_rig import MakeRig, Rig, extents_of, memory_of, sends_at_most

BLOCK, BLOCKS = 300, [0, 2, 3, 7]
NBYTES = 2 * BLOCK * len(BLOCKS)  # of two tensors
STALE = Fault(FaultKind.REFUSED, "stale", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)

# Where the socket is full: before the answer, within each of its three parts, and between them.
CUTS = [0, 5, HEADER_NBYTES, HEADER_NBYTES + 1, HEADER_NBYTES + NBYTES - 1, HEADER_NBYTES + NBYTES]
CUTS += [HEADER_NBYTES + NBYTES + 5]


@pytest.fixture
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Has the socket take this many bytes of every answer that is sent at once."""
    most = int(request.param)

    monkeypatch.setattr(Iovecs, "send_now", sends_at_most(most))
    return most


def pull(rig: Rig) -> tuple[Any, Any, Any]:
    source, destination = memory_of(2, 8 * BLOCK, 1), memory_of(2, 8 * BLOCK, None)
    progress = rig.read(extents_of(source, BLOCKS, BLOCK), extents_of(destination, BLOCKS, BLOCK))
    there, here = (memory.reshape(2, 8, BLOCK)[:, BLOCKS] for memory in (source, destination))
    return progress, there, here


@pytest.mark.parametrize("cut", CUTS, indirect=True)
def test_the_rest_of_an_answer_follows_in_turns(rig: Rig, cut: int) -> None:
    for _ in range(2):  # the second one: the connection is in step
        progress, there, here = pull(rig)
        assert (progress.nbytes, progress.fault) == (NBYTES, None)
        assert np.array_equal(there, here)
    assert len(rig.channel.pool.sockets()) == 1
    assert rig.owner_channel.bytes_out == rig.channel.bytes_in == 2 * NBYTES
    assert rig.source.open_count == 0


@pytest.mark.parametrize("cut", CUTS[:-2], indirect=True)
def test_a_source_withdrawn_before_the_rest_ends_the_read_and_not_the_connection(
    rig: Rig, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = rig.source.send_now

    def then_withdraw(*args: Any) -> Fault | None:
        fault = at_once(*args)
        rig.source.refusal = STALE
        return fault

    monkeypatch.setattr(rig.source, "send_now", then_withdraw)
    progress, _, here = pull(rig)
    assert progress.fault == STALE
    kept = rig.channel.pool.sockets()
    if not cut:
        assert progress.nbytes == 0 and (here == 0xA5).all()
    monkeypatch.undo()
    rig.source.refusal = None
    progress, there, here = pull(rig)
    assert progress.fault is None and np.array_equal(there, here)
    assert rig.channel.pool.sockets() == kept


@pytest.mark.parametrize(
    "tensors, runs, checks", [(33, 30, 1), (33, 31, 3), (64, 32, 3)], ids=["fit", "one too many", "many"]
)
def test_more_runs_than_one_call_takes_go_in_turns(rig: Rig, tensors: int, runs: int, checks: int) -> None:
    source, destination = memory_of(tensors, 2 * runs, 1), memory_of(tensors, 2 * runs, None)
    evens = list(range(0, 2 * runs, 2))
    assert rig.read(extents_of(source, evens, 1), extents_of(destination, evens, 1)).fault is None
    assert np.array_equal(source[:, ::2], destination[:, ::2])
    assert (destination[:, 1::2] == 0xA5).all()
    assert rig.source.checks == checks  # the try, before the first byte, after the last one


def test_what_was_sent_at_once_before_does_not_count(rig: Rig) -> None:
    """On one connection: an answer at once, then one that is refused, and one of too many runs."""
    for _ in range(2):
        assert pull(rig)[0].fault is None
        refused = rig.read(extents_of(memory_of(1, 8, 1)), extents_of(memory_of(1, 9, None))).fault
        assert refused is not None and refused.code == LLMStatusCode.LLM_PARAM_INVALID
        assert pull(rig)[0].fault is None
        source, destination = memory_of(64, 64, 1), memory_of(64, 64, None)
        evens = list(range(0, 64, 2))
        assert rig.read(extents_of(source, evens, 1), extents_of(destination, evens, 1)).fault is None
        assert np.array_equal(source[:, ::2], destination[:, ::2])
    assert len(rig.channel.pool.sockets()) == 1


def test_a_source_withdrawn_in_the_middle_of_a_chunk_is_noticed_at_the_next_turn(rig: Rig) -> None:
    size = 3 * TURN_NBYTES
    assert size < CHUNK_NBYTES
    source, destination = memory_of(1, size, 1), memory_of(1, size, None)
    real = rig.source.open

    def open_once(token: bytes, selector: bytes) -> object:
        serving = real(token, selector)
        answers = iter([None, STALE])
        serving.check = lambda: next(answers)  # type: ignore[union-attr,method-assign]
        return serving

    rig.source.open = open_once  # type: ignore[method-assign,assignment]
    assert rig.read(extents_of(source), extents_of(destination)).fault == STALE
    assert np.array_equal(destination[:, :TURN_NBYTES], source[:, :TURN_NBYTES])
    assert not destination[:, TURN_NBYTES:].any()
    assert rig.source.open_count == 0


def test_a_small_read_waits_for_the_gil_once_on_each_side(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the owner when it wakes up, at the reader when the header is there; all else keeps the GIL."""
    memory = memory_of(1, NOW_NBYTES, 1)
    assert rig.read(extents_of(memory), extents_of(memory_of(1, NOW_NBYTES, None))).fault is None
    waits: list[str] = []
    for name in ("_sendmsg", "_recvmsg", "_recv"):
        call = getattr(_sockets, name)

        def note(*args: Any, _name: str = name, _call: Any = call) -> Any:
            waits.append(_name)
            return _call(*args)

        monkeypatch.setattr(_sockets, name, note)
    destination = memory_of(1, NOW_NBYTES, None)
    assert rig.read(extents_of(memory), extents_of(destination)).fault is None
    assert np.array_equal(memory, destination)
    assert waits.count("_recv") == 1 and "_sendmsg" not in waits
    assert len(waits) <= 2  # the second one: the kernel had not queued all of it yet


def test_a_far_peer_gets_several_connections_whatever_the_machine(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    seen: list[tuple[int, int]] = []
    whole = ReadingConnection.read

    def note(self: ReadingConnection, selector: bytes, into: Any, start: int, stop: int, by: float) -> Any:
        seen.append((start, stop))
        return whole(self, selector, into, start, stop, by)

    monkeypatch.setattr(ReadingConnection, "read", note)
    size = 4 * tcp_channel.FAR_STRIPE_NBYTES
    source, destination = memory_of(1, size, 1), memory_of(1, size, None)
    for round_trip_s, parts in ((0.0, 1), (tcp_channel.FAR_S, 4)):
        seen.clear()
        destination[:] = 0xA5
        rig.channel.pool.round_trip_s = round_trip_s
        assert rig.read(extents_of(source), extents_of(destination)).fault is None
        assert np.array_equal(source, destination)
        assert len(seen) == parts
