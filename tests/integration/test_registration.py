"""Rows M: what registering memory accepts, and what it leaves behind when it does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from tests.support import actors
from tests.support.memory import Mapping
from tests.support.pair import D_ID, P_ID, SEED, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
MIB = 1 << 20
FIXED_ADDRESS = 0x5200_0000_0000


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except LLMException as exc:
        assert exc.status_code == INVALID, repr(exc)
        return str(exc)
    raise AssertionError("not refused")


def _register_bad(w: World, kind: str) -> list[tuple[str, list[str]]]:
    """(text of the refusal, what it must hold) for each bad region and shape."""
    half = Mapping(MIB, FIXED_ADDRESS)  # nothing is mapped behind it
    good = Mapping(4 * MIB)
    w.extras |= {"half": half, "good": good}
    manager = w.dist.cache_manager
    register = manager.register_blocks_cache if kind == "blocks" else manager.register_cache

    def attempt(addresses: list[int], shape: Any = (2, MIB), tensors: int = 2) -> str:
        return _refusal(lambda: register(dd.CacheDesc(tensors, list(shape), dd.DataType.DT_UINT8), addresses))

    end = 2**64 - 4096
    nbytes = str(2 * MIB)

    def region(index: int, address: int) -> list[str]:
        return [str(index), f"{address:x}", nbytes]

    return [
        (attempt([0x1000, good.address]), region(0, 0x1000)),
        (attempt([good.address, 0x1000]), region(1, 0x1000)),
        (attempt([good.address, half.address]), region(1, half.address)),
        (attempt([good.address, 0]), ["1"]),
        (attempt([end, good.address]), region(0, end)),
        (attempt([good.address]), ["1", "2"]),
        (attempt([good.address] * 3), ["3", "2"]),
        (attempt([good.address] * 2, (0, 4)), ["0"]),
        (attempt([good.address] * 2, (4, -1)), ["-1"]),
        (attempt([good.address] * 2, (1,) * 32), ["32"]),
        (attempt([good.address] * 2, (2**40, 2**40)), []),
        (attempt([good.address] * 2, ()), []),
        (attempt([], (2, 4), 0), ["0"]),
    ]


@pytest.mark.rule("2.7")
@pytest.mark.parametrize("kind", ["blocks", "slots"])
@pytest.mark.rule("2.7", "6.3", "6.4", "6.5", "6.8", "6.9", "6.15")
def test_m1_a_bad_region_is_refused_by_register_itself(spawn: Spawner, kind: str) -> None:
    peer = spawn()
    peer.call(actors.up, P_ID, actors.options())
    for text, parts in peer.call(_register_bad, kind):
        for part in parts:
            assert part in text, (part, text)
    func = actors.blocks_cache if kind == "blocks" else actors.slot_cache
    assert peer.call(func, "good") == 1


@pytest.mark.parametrize("stride", [1, 7, 4097])
@pytest.mark.rule("6.10")
def test_m2_any_alignment_on_either_side(pair: Pair, stride: int) -> None:
    pair.up()
    skews = (1, 0x200, 4095)
    shapes = [Shape(dim0=6, stride=stride, skew=skew) for skew in skews]
    for model, shape in enumerate(shapes):
        pair.source(f"src{model}", shape, model_id=model)
        pair.destination(f"dst{model}", shape, model_id=model)
    for src, dst in product(range(len(skews)), repeat=2):
        pair.pull_blocks([5, 1], [0, 3], of_model(src), f"dst{dst}").ok()
        pair.blocks_right([5, 1], [0, 3], source=f"src{src}", name=f"dst{dst}")
        pair.d.call(actors.refill, f"dst{dst}", None)
        if pair.combo.mode == "B":
            pair.p.call(actors.push_blocks, of_model(dst, D_ID), f"src{src}", [2, 4], [5, 1])
            pair.blocks_right([2, 4], [5, 1], source=f"src{src}", name=f"dst{dst}")
            pair.d.call(actors.refill, f"dst{dst}", None)


@pytest.mark.rule("6.11")
def test_m3_a_cache_of_many_tensors(pair: Pair) -> None:
    pair.up()
    shape = Shape(tensors=376, dim0=3, stride=64)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    pair.pull_blocks([2, 0], [0, 1]).ok()
    pair.blocks_right([2, 0], [0, 1])


def test_m3_two_thousand_caches_half_of_them_after_linking(pair_of_two: Pair) -> None:
    pair = pair_of_two
    pair.up(link=False)
    shape = Shape(tensors=1, dim0=2, stride=64)
    pair.destination(shape=shape)
    pair.p.call(actors.make, "memory", tensors=2000, dim0=2, stride=64, seed=SEED)
    pair.sources["memory"] = (shape, SEED)
    pair.p.call(_many_caches, range(0, 1000))
    pair.link()
    pair.p.call(_many_caches, range(1000, 2000))
    for model in (0, 500, 999, 1000, 1500, 1999):
        pair.pull_blocks([1], [0], of_model(model)).ok()
        pair.blocks_right([1], [0], source="memory", tensors=[(0, model)])
        pair.d.call(actors.refill, "dst", None)


def _many_caches(w: World, models: range) -> None:
    """One cache per tensor of the memory, each under its own model."""
    addresses, desc = w.held["memory"].addresses, dd.CacheDesc(1, [2, 64], dd.DataType.DT_UINT8)
    for model in models:
        key = dd.BlocksCacheKey(0, model)
        w.dist.cache_manager.register_blocks_cache(desc, [addresses[model]], key)


@pytest.mark.rule("6.13", "6.15")
def test_m4_a_refused_registration_leaves_nothing(pair: Pair) -> None:
    pair.up()
    pair.destination()
    text = pair.p.call(_register_good_and_bad)
    assert "1000" in text
    pair.pull_blocks([0], [0], of_model(9)).expect(GONE)
    pair.unchanged()
    assert pair.source(model_id=9) == 1
    pair.pull_blocks([3], [4], of_model(9)).ok()
    pair.blocks_right([3], [4])


def _register_good_and_bad(w: World) -> str:
    addresses = actors.make(w, "tried")
    desc, manager = w.held["tried"].desc, w.dist.cache_manager
    return _refusal(
        lambda: manager.register_blocks_cache(desc, [addresses[0], 0x1000], dd.BlocksCacheKey(0, 9))
    )


@pytest.mark.rule("6.15", "6.21", "6.22", "6.23")
def test_m4_a_refused_key_leaves_nothing(pair: Pair) -> None:
    pair.up()
    first = pair.slots("first", keys=[(7, 0)])
    twice = pair.p.attempt(actors.slot_cache, "second", keys=[(8, 0), (7, 0)]).expect(INVALID, 7)
    assert twice.error is not None
    assert pair.slots("third", seed=5, keys=[(8, 0)]) == first + 1
    pair.p.attempt(actors.slot_cache, "fourth", keys=[(20, 0), (20, 0)]).expect(INVALID, 20)
    pair.p.attempt(actors.slot_cache, "fifth", keys=[(n, 1) for n in range(9)]).expect(INVALID, 9, 8)


@pytest.mark.parametrize("first_gone", ["aux", "kv"])
@pytest.mark.rule("6.24", "6.25")
def test_m5_the_later_cache_takes_the_block_key_over(pair: Pair, first_gone: str) -> None:
    pair.up()
    pair.p.call(actors.watch_logs)
    kv = pair.source("kv", Shape(stride=1024))
    aux = pair.source("aux", Shape(stride=256), seed=5)
    warnings = [r for r in pair.p.call(actors.log_records) if r[1] == "WARNING"]
    assert len(warnings) == 1
    assert str(kv) in warnings[0][2]
    assert str(aux) in warnings[0][2]
    pair.destination("for_kv", Shape(stride=1024))
    pair.destination("for_aux", Shape(stride=256))
    pair.pull_blocks([1], [2], name="for_kv").expect(INVALID, 1024, 256)
    pair.unchanged("for_kv")
    if first_gone == "kv":
        pair.p.call(actors.unregister, "kv")
    pair.pull_blocks([1], [2], name="for_aux").ok()
    pair.blocks_right([1], [2], source="aux", name="for_aux")
    pair.p.call(actors.unregister, "aux")
    pair.pull_blocks([1], [2], name="for_kv").expect(GONE)
    pair.unchanged("for_kv")
