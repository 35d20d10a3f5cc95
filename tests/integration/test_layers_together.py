"""Layers that are there before the destination gets to them are read together, and answered one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist._engine import codec, receiver
from llm_datadist._engine.received import ReceivedOffer
from llm_datadist._engine.receiver import Receiver
from llm_datadist._wire.framing import ProtocolError
from llm_datadist._wire.messages import PartReady
from tests.integration.test_layer_tasks import Calls, Two
from tests.support.pair import COMBOS, SUCCESS
from tests.support.world import wait_until

ALL = range(4)
MIB = 1 << 20
LAYER_NBYTES = 64 * 2  # two blocks


@pytest.fixture(params=COMBOS, ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


class AfterFirst(Calls):
    """The first layer is read alone: the others are there once its read has begun."""

    def __init__(self, reads: list[list[int]]) -> None:
        super().__init__()
        self._reads = reads

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert layer_index == 0 or wait_until(lambda: self._reads)
        return super().synchronize_layer(layer_index, timeout_in_millis)


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[list[PartReady]], None]) -> list[list[int]]:
    """The parts of each read; the first one moves when all others wait."""
    reads: list[list[int]] = []
    real: Any = Receiver._read

    def read(self: Receiver, offer: ReceivedOffer, messages: list[PartReady], started: float) -> int:
        reads.append([message.part for message in messages])
        if len(reads) == 1:
            assert wait_until(lambda: len(offer.waiting) == len(ALL) - 1)
        before(messages)
        return int(real(self, offer, messages, started))

    monkeypatch.setattr(Receiver, "_read", read)
    return reads


def test_layers_that_wait_are_read_together(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = watch(monkeypatch, lambda messages: None)
    task = two.push(AfterFirst(reads), two.config(0, ALL, ALL))
    assert task.get_results(5000) == [SUCCESS]
    assert reads == [[0], [1, 2, 3]]
    assert two.right(0, ALL, ALL)


def test_no_more_together_than_hold_a_layer_up(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_TOGETHER_NBYTES", 2 * LAYER_NBYTES)
    reads = watch(monkeypatch, lambda messages: None)
    task = two.push(AfterFirst(reads), two.config(0, ALL, ALL))
    assert task.get_results(5000) == [SUCCESS]
    assert reads == [[0], [1, 2], [3]]
    assert two.right(0, ALL, ALL)


@pytest.mark.parametrize(("seconds", "reads_of"), [(60.0, [[0], [1], [2, 3]]), (0.0, [[0], [1], [2], [3]])])
def test_reads_that_were_fast_make_the_next_ones_larger(
    two: Two, monkeypatch: pytest.MonkeyPatch, seconds: float, reads_of: list[list[int]]
) -> None:
    """``seconds``: how long layers may be held up by others."""
    monkeypatch.setattr(receiver, "_TOGETHER_NBYTES", LAYER_NBYTES)
    monkeypatch.setattr(receiver, "_TOGETHER_S", seconds)
    reads = watch(monkeypatch, lambda messages: None)
    task = two.push(AfterFirst(reads), two.config(0, ALL, ALL))
    assert task.get_results(5000) == [SUCCESS]
    assert reads == reads_of
    assert two.right(0, ALL, ALL)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "following"),
    [
        (8 * MIB, 0.05, 8 * MIB),
        (8 * MIB, 0.5, 8 * MIB // 10),
        (8 * MIB, 0.025, 16 * MIB),
        (8 * MIB, 0.0125, 32 * MIB),
        (8 * MIB, 0.001, 32 * MIB),
        (8 * MIB, 0.0, 32 * MIB),
        (1, 10.0, 0),
    ],
)
def test_what_is_read_together_is_what_takes_50_ms(nbytes: int, seconds: float, following: int) -> None:
    assert receiver._next_together(nbytes, seconds) == pytest.approx(following, abs=1)


@pytest.mark.parametrize("withdrawn", [1, 2])
def test_one_that_was_withdrawn_does_not_take_the_others_along(
    two: Two, withdrawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = two.me._engine._state.leases  # type: ignore[union-attr]

    def withdraw(messages: list[PartReady]) -> None:
        for message in messages:
            if message.part == withdrawn:
                (lease,) = [lease for lease in leases.all() if lease.lease_id == message.lease_id] or [None]
                if lease is not None:
                    leases.end(lease)

    reads = watch(monkeypatch, withdraw)
    task = two.push(AfterFirst(reads), two.config(0, ALL, ALL))
    assert task.get_results(5000) != [SUCCESS]
    assert reads[: 2 + withdrawn] == [[0], [1, 2, 3], [1], [2]][: 2 + withdrawn]
    assert two.memory[2 * withdrawn, 1, 0] != two.into[0][2 * withdrawn, 2, 0]
    assert (two.into[0][: 2 * withdrawn, 2] == two.memory[: 2 * withdrawn, 1]).all()


@pytest.mark.parametrize("two", [c for c in COMBOS if c.backend == "tcp"], ids=str, indirect=True)
def test_a_read_with_too_many_leases_is_refused(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner bounds what it looks up for one read."""
    read = codec.read_selector

    def strict(data: bytes) -> Any:
        request, part = read(data)
        if len(request.more_leases) > 1:
            raise ProtocolError("too many leases")
        return request, part

    monkeypatch.setattr(codec, "read_selector", strict)
    reads = watch(monkeypatch, lambda messages: None)
    task = two.push(AfterFirst(reads), two.config(0, ALL, ALL))
    assert task.get_results(5000) == [SUCCESS]
    assert reads == [[0], [1, 2, 3], [1], [2], [3]], "then one by one"
