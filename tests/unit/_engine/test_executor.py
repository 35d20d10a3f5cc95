"""One move: the words before and after the bytes, cuts, and what each kind of end becomes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._engine.executor import MoveError, Stale, move
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import Peer
from llm_datadist.status import CacheNotExistError, LLMStatusCode
from llm_datadist.transports.seam import Completion, Fault, FaultKind, Progress
from tests.support.streams import addresses_of

DEADLINE = 1234.5
LINK: Any = object()
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
    """Copies within this process; ``steps`` happen before the reads, in turn."""

    def __init__(self, *steps: Step | None) -> None:
        self.steps = list(steps)
        self.reads: list[int] = []
        self.partial = 0

    def read(self, plan: Segments) -> Completion:
        self.reads.append(plan.nbytes)
        return Read(self, plan)

    def close(self) -> None:
        pass


class Rig:
    """16 bytes to move, two words that guard them, a flight."""

    def __init__(self, *steps: Step | None, one_sided: bool = True) -> None:
        self.src, self.dst = np.arange(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
        self.slab = np.array([11, 22], dtype=np.uint64)
        self.words = [GenerationWord(self.slab.ctypes.data + 8 * i, int(v)) for i, v in enumerate(self.slab)]
        self.channel = Channel(*steps)
        self.peer = Peer(self.channel, "fake", one_sided, ())
        self.flight = Flight(LINK, ())

    def move(self, nbytes: int = 16) -> None:
        sides = [
            Extents.of(*(np.array([n], dtype=np.uint64) for n in (a.ctypes.data, 0, nbytes)))
            for a in (self.src, self.dst)
        ]
        source = sides[0] if self.peer.one_sided else b"selector"
        words = self.words if self.peer.one_sided else ()
        move(self.peer, Segments(source, sides[1]), words, DEADLINE, self.flight)

    @property
    def unchanged(self) -> bool:
        return not self.dst.any()


def failing(kind: FaultKind, code: int = 0) -> Step:
    return lambda _: Fault(kind, "why", code)


def test_words_then_bytes_then_words() -> None:
    rig = Rig()
    rig.move()
    assert rig.channel.reads == [16, 16, 16]
    assert rig.dst.tolist() == rig.src.tolist()
    assert rig.peer.bytes_in == 16


def test_nothing_to_move_is_no_traffic() -> None:
    rig = Rig()
    rig.move(0)
    assert rig.channel.reads == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_word_changed_before_moves_nothing(which: int) -> None:
    rig = Rig()
    rig.slab[which] = 0
    with pytest.raises(Stale) as caught:
        rig.move()
    assert not caught.value.begun
    assert rig.unchanged
    assert len(rig.channel.reads) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_word_changed_while_bytes_moved_is_noticed(which: int) -> None:
    def withdraw(plan: Segments) -> None:
        rig.slab[which] = 0

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


def test_without_addresses_the_owner_checks_the_words() -> None:
    rig = Rig(one_sided=False)
    rig.move()
    assert rig.channel.reads == [16]
    assert rig.peer.bytes_in == 16


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_cut_in_any_read_ends_with_its_error(at: int) -> None:
    gone = CacheNotExistError("gone")

    def cut(plan: Segments) -> None:
        rig.flight.cut(gone)

    rig = Rig(*[None] * at, cut)
    with pytest.raises(CacheNotExistError) as caught:
        rig.move()
    assert caught.value is gone
    assert rig.unchanged == (at < 2)


def test_a_cut_before_moves_nothing() -> None:
    rig = Rig()
    rig.flight.cut(CacheNotExistError("gone"))
    with pytest.raises(CacheNotExistError):
        rig.move()
    assert rig.unchanged
