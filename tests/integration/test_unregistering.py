"""§6 registering and unregistering: what is open to peers, memory of several caches, and who is waited for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors, allocated
from tests.support.pair import D_ID, SEED, Pair, Shape, by_id, of_model
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
MIB = 1 << 20


@pytest.mark.rule("6.16", "6.17", "6.18")
def test_who_is_open_to_peers(pair: Pair) -> None:
    """(placement, what was asked, what it is), for both kinds of cache."""
    pair.up()
    rows: list[tuple[str, Any, bool]] = [
        ("DEVICE", None, True),
        ("DEVICE", False, False),
        ("DEVICE", True, True),
        ("HOST", None, False),
        ("HOST", False, False),
        ("HOST", True, True),
    ]
    pair.destination()
    pair.slot_destination("slot")
    for at, (placement, asked, accessible) in enumerate(rows):
        pair.source(f"b{at}", model_id=at, placement=placement, accessible=asked)
        cache_id = pair.slots(f"s{at}", placement=placement, accessible=asked)
        assert [c[3] for c in pair.p.call(allocated.caches)[-2:]] == [accessible, accessible], rows[at]
        for outcome in (
            pair.pull_blocks([1], [2], of_model(at)),
            pair.pull_cache(by_id(cache_id, 1), 2, name="slot"),
        ):
            if accessible or pair.combo.mode == "A":
                outcome.ok()
            else:
                outcome.expect(INVALID, "remote_accessible")


@pytest.mark.rule("6.12")
def test_one_memory_may_be_in_several_caches(pair: Pair) -> None:
    pair.up()
    pair.source(model_id=0)
    assert pair.source(model_id=1) == 2  # the same memory again
    cache_id = pair.slots()
    pair.destination()
    pair.slot_destination("slot")
    for model_id in (0, 1):
        pair.pull_blocks([model_id], [3], of_model(model_id)).ok()
        pair.blocks_right([model_id], [3])
    pair.pull_cache(by_id(cache_id, 5), 2, name="slot").ok()
    pair.blocks_right([5], [2], name="slot")
    pair.p.call(_unregister_id, 1)
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([6], [3], of_model(1)).ok()
    pair.blocks_right([6], [3])


def _unregister_id(w: World, cache_id: int) -> None:
    w.dist.cache_manager.unregister_cache(cache_id)


@pytest.mark.rule("6.26")
def test_an_unknown_id_is_fine(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    for cache_id in (0, -1, 99, 2**63 - 1):
        pair.p.call(_unregister_id, cache_id)
    pair.pull_blocks([1], [2]).ok()
    pair.p.call(actors.unregister, "src")
    pair.p.call(actors.unregister, "src")


def _unregister_and_unmap(w: World) -> float:
    actors.unregister(w, "dst")
    returned = time.monotonic()
    actors.unmap(w, "dst")
    return returned


@pytest.mark.parametrize(("mode", "what"), [("A", "pull"), ("B", "pull"), ("B", "push")])
@pytest.mark.rule("6.30", "6.32")
def test_unregister_waits_for_what_is_being_written_there(spawn: Spawner, mode: str, what: str) -> None:
    """Our own pull, or a peer's push into our cache: the memory may go once unregister has returned."""
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        shape = Shape(tensors=1, dim0=60, stride=MIB)  # 6 s
        pair.source(shape=shape, seed=SEED)
        pair.destination(shape=shape, model_id=0)
        every = list(range(60))
        moving = (
            pair.d.start(_ended_at, "pull_blocks", of_model(0), "dst", every)
            if what == "pull"
            else pair.p.start(_ended_at, "push_blocks", of_model(0, D_ID), "src", every)
        )
        assert pair.d.call(_first_byte_arrived)
        watch = Stopwatch()
        ending = pair.d.start(_unregister_and_unmap)
        actors.pause(0.2)
        assert not ending.done()
        pair.full_speed()
        returned_at = ending.result()
        noted = 0.05 if what == "pull" else 0.5
        assert returned_at >= moving.result() - noted - watch.took().stalled
        assert not pair.d.call(allocated.caches)


def _ended_at(w: World, method: str, key: Any, name: str, blocks: list[int]) -> float:
    getattr(actors, method)(w, key, name, blocks, blocks)
    return time.monotonic()


def _first_byte_arrived(w: World) -> bool:
    held = w.held["dst"]
    first = held.tensor(0)[:MIB]
    return actors.wait_until(lambda: bool((first != 0xA5).any()), 10.0)
