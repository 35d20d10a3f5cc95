"""One move: the words before and after the bytes, cuts, and what each kind of end becomes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._engine import executor, initiator
from llm_datadist._engine.executor import MoveError, Stale, Wanted, move
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import Peer
from llm_datadist._engine.ways import Way
from llm_datadist.status import CacheNotExistError, LLMStatusCode
from llm_datadist.transports.seam import Completion, Fault, FaultKind, Progress, TransportCaps
from tests.support.streams import addresses_of

DEADLINE = time.monotonic() + 3600
LINK: Any = object()
NO_PLAN: Any = None  # a word is read
CACHE = RemoteCache(3, Layout(1, 1, 16), True, GenerationWord(8, 9), np.zeros(1, dtype=np.uint64))
Step = Callable[[Segments], Fault | None]


def copy(plan: Segments) -> None:
    assert isinstance(plan.source, Extents)
    for src, dst in zip(addresses_of(plan.source), addresses_of(plan.destination), strict=True):
        ctypes.memmove(dst, src, 1)


class Read:
    """One read of the fake: runs its step in ``wait``."""

    def __init__(self, channel: Channel, plan: Segments) -> None:
        self._channel, self._plan = channel, plan
        self._cancelled = False

    def wait(self, *, deadline: float) -> Progress:
        assert deadline == DEADLINE
        if self._cancelled:
            return Progress(0, Fault(FaultKind.CANCELLED, "cancelled"))
        step = self._channel.steps.pop(0) if self._channel.steps else None
        fault = step(self._plan) if step else None
        if self._cancelled:
            fault = Fault(FaultKind.CANCELLED, "cancelled")
        if fault is not None:
            return Progress(self._channel.partial, fault)
        if isinstance(self._plan.source, Extents):
            copy(self._plan)
        return Progress(self._plan.nbytes)

    def cancel(self, reason: str = "") -> None:
        self._cancelled = True


class Channel:
    """Copies within this process; ``steps`` happen before the reads, of words too, in turn."""

    def __init__(self, *steps: Step | None) -> None:
        self.steps = list(steps)
        self.reads: list[int] = []
        self.partial = 0

    def read(self, plan: Segments) -> Completion:
        self.reads.append(plan.nbytes)
        return Read(self, plan)

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        assert deadline == DEADLINE
        self.reads.append(8)
        step = self.steps.pop(0) if self.steps else None
        fault = step(NO_PLAN) if step else None
        return fault or ctypes.c_uint64.from_address(address).value

    def close(self) -> None:
        pass


class Rig:
    """16 bytes to move, a word that guards them, a flight."""

    def __init__(self, *steps: Step | None, one_sided: bool = True) -> None:
        self.src, self.dst = np.arange(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
        self.slab = np.array([11], dtype=np.uint64)
        self.word = GenerationWord(self.slab.ctypes.data, 11)
        self.channel = Channel(*steps)
        caps = TransportCaps(one_sided=one_sided, same_host_only=True)
        self.peer = Peer((Way("fake", caps, self.channel, self.channel if one_sided else None),), ())
        self.flight = Flight(LINK, ())

    def move(self, nbytes: int = 16) -> None:
        bases, row = (np.array([n], dtype=np.uint64) for n in (self.src.ctypes.data, nbytes))
        cache = msgspec.structs.replace(CACHE, addresses=bases)
        part = CacheSlice(0, 1, np.zeros(1, dtype=np.uint64), nbytes, nbytes)
        here = np.array([self.dst.ctypes.data], dtype=np.uint64)
        destination = Extents.of(here, np.zeros(1, dtype=np.uint64), row)
        move(self.peer, Wanted(cache, part, self.word, self.word, None), destination, DEADLINE, self.flight)

    @property
    def unchanged(self) -> bool:
        return not self.dst.any()


def failing(kind: FaultKind, code: int = 0) -> Step:
    return lambda _: Fault(kind, "why", code)


def test_word_then_bytes_then_word() -> None:
    rig = Rig()
    rig.move()
    assert rig.channel.reads == [8, 16, 8]
    assert rig.dst.tolist() == rig.src.tolist()
    assert rig.peer.bytes_in == 16


@pytest.mark.rule("5.137")
def test_nothing_to_move_is_no_traffic() -> None:
    rig = Rig()
    rig.move(0)
    assert rig.channel.reads == []


def test_a_word_changed_before_moves_nothing() -> None:
    rig = Rig()
    rig.slab[0] = 0
    with pytest.raises(Stale) as caught:
        rig.move()
    assert not caught.value.begun
    assert rig.unchanged
    assert len(rig.channel.reads) == 1


def test_a_word_changed_while_bytes_moved_is_noticed() -> None:
    def withdraw(plan: Segments) -> None:
        rig.slab[0] = 0

    rig = Rig(None, withdraw)
    with pytest.raises(Stale) as caught:
        rig.move()
    assert caught.value.begun
    assert rig.peer.bytes_in == 0


def test_a_source_that_cannot_be_read_is_stale_if_it_was_withdrawn() -> None:
    def withdrawn(plan: Segments) -> Fault:
        rig.slab[0] = 0
        return Fault(FaultKind.SOURCE, "EFAULT")

    rig = Rig(None, withdrawn)
    with pytest.raises(Stale):
        rig.move()


@pytest.mark.parametrize("kind", list(FaultKind))
def test_a_fault_of_the_bytes_is_a_move_error_with_it(kind: FaultKind) -> None:
    rig = Rig(None, failing(kind, LLMStatusCode.LLM_PARAM_INVALID))
    rig.channel.partial = 5
    with pytest.raises(MoveError, match="why") as caught:
        rig.move()
    assert (caught.value.fault.kind, caught.value.nbytes) == (kind, 5)
    assert rig.peer.bytes_in == 0


@pytest.mark.parametrize("at", [0, 2])
def test_words_that_cannot_be_read_are_a_move_error(at: int) -> None:
    steps: list[Step | None] = [None, None, None]
    steps[at] = failing(FaultKind.PEER_LOST)
    rig = Rig(*steps)
    with pytest.raises(MoveError) as caught:
        rig.move()
    assert caught.value.fault.kind is FaultKind.PEER_LOST
    assert rig.unchanged == (at == 0)


@pytest.mark.parametrize(("partial", "begun"), [(0, False), (7, True)])
def test_an_owner_that_refuses_for_a_missing_cache_is_stale(partial: int, begun: bool) -> None:
    rig = Rig(failing(FaultKind.REFUSED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), one_sided=False)
    rig.channel.partial = partial
    with pytest.raises(Stale) as caught:
        rig.move()
    assert caught.value.begun == begun


@pytest.mark.parametrize("one_sided", [True, False])
def test_what_is_withdrawn_when_the_time_is_over_is_a_time_out(
    monkeypatch: pytest.MonkeyPatch, one_sided: bool
) -> None:
    """A lease ends with the time of its pull, and a busy reader may hear of that first."""
    if one_sided:
        rig = Rig()
        rig.slab[0] += 1
    else:
        rig = Rig(failing(FaultKind.REFUSED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), one_sided=False)
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: DEADLINE))
    with pytest.raises(MoveError) as caught:
        rig.move()
    assert caught.value.fault.kind is FaultKind.TIMEOUT
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: DEADLINE - 0.001))
    rig.channel.steps = (
        [] if one_sided else [failing(FaultKind.REFUSED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)]
    )
    with pytest.raises(Stale):
        rig.move()


@pytest.mark.parametrize(("left_s", "asked_ms"), [(0.050, 50), (0.0501, 51), (0.0001, 1), (-1.0, 1)])
def test_a_lease_is_asked_for_until_the_end_of_the_call_at_least(
    monkeypatch: pytest.MonkeyPatch, left_s: float, asked_ms: int
) -> None:
    monkeypatch.setattr(initiator, "time", SimpleNamespace(monotonic=lambda: 0.0))
    pull: Any = SimpleNamespace(deadline=left_s)
    assert initiator._Pull._time_left_ms(pull) == asked_ms


def test_without_addresses_the_owner_checks_the_words() -> None:
    rig = Rig(one_sided=False)
    rig.move()
    assert rig.channel.reads == [16]
    assert rig.peer.bytes_in == 16


@pytest.mark.parametrize("at", [0, 1])
def test_a_cut_before_the_last_byte_ends_with_its_error(at: int) -> None:
    gone = CacheNotExistError("gone")

    def cut(plan: Segments) -> None:
        rig.flight.cut(gone)

    rig = Rig(*[None] * at, cut)
    with pytest.raises(CacheNotExistError) as caught:
        rig.move()
    assert caught.value is gone
    assert rig.unchanged


def test_a_cut_before_moves_nothing() -> None:
    rig = Rig()
    rig.flight.cut(CacheNotExistError("gone"))
    with pytest.raises(CacheNotExistError):
        rig.move()
    assert rig.unchanged
