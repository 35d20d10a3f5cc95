"""Rows S: what the owner withdrew is never read as if it were still there."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.testing.owner import Memory
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.seam import TransportUnavailable
from tests.support import actors, allocated
from tests.support.engines import Engines
from tests.support.memory import PAGE, bytes_at
from tests.support.pair import D_ID, SEED, SUCCESS, Pair, Shape, by_id, by_request, of_model
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.which_combos import THREE
from tests.support.world import World, wait_until

GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
FIXED_ADDRESS = 0x5100_0000_0000


def _rounds(pair: Pair, full: int, few: int) -> int:
    """Repeat counts hold for one combination; the others repeat a few times."""
    return full if str(pair.combo) == "B-local" else few


@pytest.mark.parametrize("kind", ["blocks", "request", "id"])
@pytest.mark.rule("5.12", "6.28", "6.33", "R.2", "S.8")
def test_s1_a_withdrawn_cache_is_not_read(pair: Pair, kind: str) -> None:
    if kind == "request" and pair.combo.mode == "B":
        pytest.skip("mode B has no request keys for pull_cache")
    pair.up()
    pair.source("other")
    pair.destination("dst")
    pair.slot_destination("slots")
    name = "dst" if kind == "blocks" else "slots"
    for at in range(_rounds(pair, 100, 15)):
        if kind == "blocks":
            pair.source("src", model_id=1)
        else:
            cache_id = pair.slots("src", keys=[(at + 1, 5)])
        pair.p.call(actors.unregister, "src")
        if kind == "blocks":
            outcome = pair.pull_blocks([0], [0], of_model(1))
        else:
            key = by_request(at + 1, 5) if kind == "request" else by_id(cache_id)
            outcome = pair.pull_cache(key, name="slots")
        outcome.expect(GONE)
        pair.p.call(actors.unmap, "src")
        pair.unchanged(name)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2], source="other")


GENERATION_SHAPE = Shape(tensors=4, dim0=32, stride=65536)  # long enough to be torn, 2 ms or so


@THREE
@pytest.mark.parametrize(("seconds", "at_least"), [(1.0, 10), pytest.param(10.0, 50, marks=pytest.mark.slow)])
@pytest.mark.rule("5.14", "6.33", "R.2", "R.13", "S.8")
def test_s2_a_pull_holds_one_generation_only(pair: Pair, seconds: float, at_least: int) -> None:
    pair.up()
    pair.p.call(actors.make, "src", **GENERATION_SHAPE.memory())
    pair.destination(shape=GENERATION_SHAPE)
    churn = pair.p.start(_churn)
    pulls = pair.d.call(_pull_until, time.monotonic() + seconds, at_least)
    pair.p.call(actors.raise_flag, "enough")
    lives = churn.result()
    good = [(began, ended, generations) for began, ended, code, generations in pulls if code == SUCCESS]
    for began, ended, generations in good:
        assert len(generations) == 1, f"one pull holds the generations {generations}"
        start, end = lives[generations[0]]
        assert start <= ended and began <= end, f"generation {generations[0]} was not registered meanwhile"
    assert {code for _, _, code, _ in pulls} <= {SUCCESS, GONE}


def _churn(w: World) -> dict[int, tuple[float, float]]:
    """Generation -> from when until when it was (at most) registered."""
    held, rng, lives, generation = w.held["src"], random.Random(3), {}, 0
    while not w.extras.get("enough"):
        generation += 1
        for t in range(held.tensors):
            held.tensor(t).view(np.uint32)[:] = generation
        began = time.monotonic()
        actors.blocks_cache(w, "src", model_id=0)
        time.sleep(rng.uniform(0, 0.005))
        actors.unregister(w, "src")
        lives[generation] = (began, time.monotonic())
        time.sleep(rng.uniform(0, 0.002))
    return lives


def _pull_until(w: World, until: float, at_least: int) -> list[tuple[float, float, LLMStatusCode, list[int]]]:
    """Until that instant, and until so many pulls were good and so many were not."""
    held, results, good = w.held["dst"], [], 0
    blocks = list(range(GENERATION_SHAPE.dim0))
    while time.monotonic() < until or not at_least <= good <= len(results) - at_least:
        began, code = time.monotonic(), SUCCESS
        try:
            actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
        except LLMException as exc:
            code = exc.status_code
        ended = time.monotonic()
        seen: set[int] = set()
        if code == SUCCESS:
            for t in range(held.tensors):
                words = held.tensor(t).view(np.uint32)
                whole = bool((words == words[0]).all())
                seen |= {int(words[0])} if whole else set(np.unique(words).tolist())
        results.append((began, ended, code, sorted(seen)))
        good += code == SUCCESS
    return results


def test_s3_a_larger_mapping_at_the_same_address(pair: Pair) -> None:
    if pair.combo.backend == "shm":
        pair.up(MemPoolConfig=allocated.pool(4 << 20))
        put, take_away = _put_into_the_pool, allocated.deallocate
    else:
        pair.up()
        put, take_away = _put_at_the_address, _unregister_and_unmap
    small, large = (Shape(tensors=1, dim0=n, stride=65536) for n in (16, 32))
    pair.destination(shape=large)
    address = put(pair, small, SEED)
    pair.pull_blocks([15], [0]).ok()
    pair.blocks_right([15], [0])
    pair.d.call(actors.refill, "dst", None)
    pair.p.call(take_away, "src")
    assert put(pair, large, SEED + 1) == address
    pair.pull_blocks([31], [31]).ok()
    pair.blocks_right([31], [31])


def _put_at_the_address(pair: Pair, shape: Shape, seed: int) -> int:
    pair.source(shape=shape, seed=seed, address=FIXED_ADDRESS, gap=0)
    return FIXED_ADDRESS


def _put_into_the_pool(pair: Pair, shape: Shape, seed: int) -> int:
    pair.sources["src"] = (shape, seed)
    pair.p.call(
        allocated.blocks, "src", model_id=0, seed=seed, tensors=1, dim0=shape.dim0, stride=shape.stride
    )
    (address,) = pair.p.call(allocated.addresses, "src")
    return int(address)


@pytest.mark.rule("5.11")
def test_s4_a_cache_registered_after_linking_is_seen_at_once(pair: Pair) -> None:
    pair.up()
    pair.destination()
    for at in range(_rounds(pair, 200, 20)):
        name = f"src{at}"
        pair.source(name, seed=SEED + at, model_id=at)
        pair.pull_blocks([at % 8], [3], of_model(at)).ok()
        pair.blocks_right([at % 8], [3], source=name)
        pair.d.call(actors.refill, "dst", None)


@pytest.mark.rule("5.11", "6.19")
def test_s4_slots_by_id_and_request_are_seen_at_once(pair: Pair) -> None:
    pair.up()
    pair.slot_destination()
    for at in range(10):
        cache_id = pair.slots(f"src{at}", seed=SEED + at, keys=[(at, 0), (at + 100, 0)])
        key = by_request(at + 100) if pair.combo.mode == "A" else by_id(cache_id, 1)
        pair.pull_cache(key, 2).ok()
        pair.right([([1024], [2048], 1024)], source=f"src{at}")
        pair.d.call(actors.refill, "dst", None)


@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.rule("5.6", "6.29", "6.33")
def test_s5_memory_withdrawn_while_it_is_read(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        shape = Shape(tensors=2, dim0=30, stride=1 << 20)  # 6 s
        pair.source(shape=shape)
        pair.source("other", model_id=1)
        pair.destination(shape=shape)
        pair.destination("small")
        blocks = list(range(30))
        running = pair.d.start(_timed_pull, blocks)
        assert wait_until(lambda: bool(pair.p.call(actors.busy)))
        actors.pause(0.3)  # in the middle
        watch = Stopwatch()
        ending = pair.p.start(_unregister_and_unmap, "src")
        actors.pause(0.3)
        pair.full_speed()
        unregistered_at = ending.result()
        outcome, ended_at = running.result()
        if mode == "A":
            assert outcome == SUCCESS
            assert unregistered_at >= ended_at - 0.05 - watch.took().stalled
        assert outcome in (SUCCESS, GONE)
        if outcome == SUCCESS:
            pair.blocks_right(blocks, blocks)
        pair.pull_blocks([1], [2], of_model(1), "small").ok()
        pair.blocks_right([1], [2], source="other", name="small")


def _timed_pull(w: World, blocks: list[int]) -> tuple[LLMStatusCode, float]:
    try:
        actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
    except LLMException as exc:
        return exc.status_code, time.monotonic()
    return SUCCESS, time.monotonic()


def _unregister_and_unmap(w: World, name: str) -> float:
    actors.unregister(w, name)
    returned = time.monotonic()
    actors.unmap(w, name)
    return returned


@pytest.mark.rule("5.129", "5.130")
def test_memory_that_is_no_longer_mapped_fails_and_the_link_lives(pair: Pair) -> None:
    """A cache whose memory its owner unmapped without unregistering: LLM_FAILED, and the link lives."""
    pair.combo.needs_own_mappings("its owner unmaps the source")
    pair.up()
    pair.source()
    pair.source("other", model_id=1)
    pair.destination(model_id=5)
    pair.p.call(_unmap_under_the_cache)
    where = {  # NIXL does not say
        "tcp": "byte 3072 of tensor 0 of cache 1 of the owner",
        "nixl": "memory of the peer cannot be read",
    }.get(pair.combo.backend, "address 0x")
    pair.pull_blocks([3], [0]).expect(LLMStatusCode.LLM_FAILED, "unregister before unmapping", where)
    if pair.combo.mode == "B":
        push = pair.p.attempt(actors.push_blocks, of_model(5, D_ID), "src", [0], [0])
        push.expect(LLMStatusCode.LLM_FAILED)
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([3], [4], of_model(1)).ok()
    pair.blocks_right([3], [4], source="other")


def test_a_reader_that_has_addresses_is_told_the_one_that_is_not_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over tcp alone it has none, and is told none."""

    def elsewhere(*_: Any, **__: Any) -> None:
        raise TransportUnavailable("the peer is on another host")

    monkeypatch.setattr(LocalTransport, "open", elsewhere)
    with Engines("B", "auto") as engines:
        owner, reader = engines.make(1, MemPoolConfig=allocated.pool(1 << 20)), engines.make(2)
        assert engines.link(reader, 1, owner) == SUCCESS
        assert reader.links()[0].transport == "shm+tcp"
        memory = Memory()
        base = memory.map_sparse(3 * PAGE)
        engines.register(owner, bytes_at(base, 3 * PAGE).reshape(3, 1, PAGE), 0)
        cache = engines.register(reader, np.zeros((3, 1, PAGE), np.uint8))
        memory.protect(base + PAGE, PAGE, "")
        where = f"byte 0 of tensor 1 of cache 1, at {base + PAGE:#x}, of the owner is not readable"
        with pytest.raises(LLMException, match=where):
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
    memory.close()


def _unmap_under_the_cache(w: World) -> None:
    w.held["src"].mapping.close()


def test_s1_what_is_gone_is_not_judged_by_its_old_size(pair_b: Pair) -> None:
    """The reader's copy of the table may be behind: rules are only broken by what is there."""
    pair = pair_b.up()
    pair.destination(shape=Shape(stride=1024))
    for _ in range(150):
        pair.source("src", Shape(stride=256))
        pair.pull_blocks([1], [2]).expect(LLMStatusCode.LLM_PARAM_INVALID)
        pair.p.call(actors.unregister, "src")
        pair.pull_blocks([1], [2]).expect(GONE)
        pair.p.call(actors.unmap, "src")
    pair.unchanged()
