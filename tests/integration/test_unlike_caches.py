"""§5 what pulls and pushes compare of two caches, and what they do not; how a source is found."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from tests.support import actors, allocated
from tests.support.pair import D_ID, P_ID, Pair, Shape, by_id, by_request, of_model
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def _as_floats(w: World, name: str, kind: str, model_id: int | None = None) -> int:
    """Registers memory of two tensors of 8 x 1,024 bytes as floats of another shape."""
    held = w.held[name]
    held.desc = dd.CacheDesc(2, [8, 2, 16, 8], dd.DataType.DT_FLOAT, batch_dim_index=2)
    func = actors.blocks_cache if kind == "blocks" else actors.slot_cache
    return int(func(w, name, **({} if model_id is None else {"model_id": model_id})))


@pytest.mark.rule("5.45")
def test_types_and_shapes_are_not_compared(pair: Pair) -> None:
    pair.up()
    pair.source()
    cache_id = pair.slots("slots")
    for kind in ("blocks", "slots"):
        pair.d.call(actors.make, f"to_{kind}")
        into = pair.d.call(_as_floats, f"to_{kind}", kind, **({"model_id": 5} if kind == "blocks" else {}))
    pair.pull_blocks([1, 7], [7, 0], name="to_blocks").ok()
    pair.blocks_right([1, 7], [7, 0], name="to_blocks")
    pair.pull_cache(by_id(cache_id, 6), 3, name="to_slots").ok()
    pair.blocks_right([6], [3], "slots", "to_slots")
    if pair.combo.mode == "B":
        for kind in ("blocks", "slots"):
            pair.d.call(actors.refill, f"to_{kind}", None)
        pair.p.call(actors.push_blocks, of_model(5, D_ID), "src", [2], [4])
        pair.blocks_right([2], [4], name="to_blocks")
        pair.p.call(actors.push_cache, by_id(into, 1, D_ID), "slots", 5)
        pair.blocks_right([5], [1], "slots", "to_slots")


def _with_keys(w: World, name: str, keys: list[tuple[int, int, int]]) -> None:
    """A contiguous cache with (req_id, model_id, prefix_id) keys."""
    actors.make(w, name, seed=len(keys) + 20)
    held = w.held[name]
    held.cache = w.dist.cache_manager.register_cache(
        held.desc, held.addresses, [dd.CacheKey(99, *key) for key in keys]
    )


@pytest.mark.rule("5.47", "5.48", "5.50", "6.19")
def test_a_source_is_found_by_its_request_or_prefix_and_its_model(pair: Pair) -> None:
    pair.up()
    none = allocated.NONE
    pair.p.call(_with_keys, "src", [(7, 0, none), (7, 1, none), (none, 0, 7), (none, 1, 7)])
    pair.sources["src"] = (Shape(), 24)
    pair.slot_destination()
    pair.destination("paged")
    for slot, key in enumerate([(7, 0), (7, 1), (none, 0, 7), (none, 1, 7)]):
        if pair.combo.mode == "A":
            pair.pull_cache(dd.CacheKey(P_ID, *key), slot).ok()
        pair.pull_blocks([], [slot], dd.CacheKey(P_ID, *key), "paged").ok()
    pair.blocks_right(range(4), range(4), name="paged")
    if pair.combo.mode == "A":
        pair.blocks_right(range(4), range(4))
    for missing in [(7, 2), (8, 0), (none, 2, 7), (none, 0, 8)]:
        pair.pull_blocks([], [5], dd.CacheKey(P_ID, *missing), "paged").expect(GONE)
    pair.blocks_right(range(4), range(4), name="paged")


def _protect(w: World, name: str, rights: int) -> None:
    mapping = w.held[name].mapping
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(mapping.address), mapping.nbytes, rights) == 0


@pytest.mark.rule("5.67")
def test_a_destination_that_cannot_be_written_is_refused(pair: Pair) -> None:
    pair.up()
    pair.source()
    cache_id = pair.slots("slots")
    pair.destination(model_id=0, own=True)
    pair.slot_destination("slot", own=True)
    for name in ("dst", "slot"):
        pair.d.call(_protect, name, mmap.PROT_READ)
    pair.pull_blocks([1], [2]).expect(INVALID, "cannot be written")
    pair.pull_cache(by_id(cache_id), 0, name="slot").expect(INVALID, "cannot be written")
    if pair.combo.mode == "B":
        push = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [2])
        push.expect(INVALID, "cannot be written")
    pair.unchanged()
    pair.unchanged("slot")
    pair.d.call(_protect, "dst", mmap.PROT_READ | mmap.PROT_WRITE)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("5.76")
def test_each_kind_of_cache_has_its_own_pushes(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source("blocks")
    pair.slots("slots")
    to_blocks = pair.destination(model_id=0)
    pair.p.attempt(actors.push_cache, by_id(to_blocks, 1, D_ID), "slots").expect(INVALID, "blocks cache")
    pair.p.attempt(actors.push_cache, by_id(to_blocks, 1, D_ID), "blocks").expect(INVALID, "blocks cache")
    pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "slots", [1], [2]).expect(INVALID, "blocks cache")
    pair.unchanged()


@pytest.mark.rule("5.133")
def test_a_pull_that_is_held_up_does_not_hold_up_another_on_its_link(pair: Pair) -> None:
    pair.up(timeout_ms=20_000)
    pair.source()
    cache_id = pair.slots("slots", keys=[(1, 0)])
    pair.slot_destination("slot")
    pair.destination()
    pair.d.call(allocated.close_gate)
    held = pair.d.start(actors.pull_cache, by_id(cache_id, 2), "slot", 0)
    assert pair.d.call(allocated.gate_reached)
    for block in range(8):
        pair.pull_blocks([block], [block]).ok()
    assert not held.done()
    pair.d.call(allocated.open_gate)
    held.result()
    pair.blocks_right(range(8), range(8))
    pair.blocks_right([2], [0], "slots", "slot")


@pytest.mark.rule("5.35", "5.36")
def test_a_request_key_is_for_mode_a_and_an_id_for_both(pair: Pair) -> None:
    pair.up()
    cache_id = pair.slots(keys=[(5, 0)])
    pair.slot_destination()
    by_key: Any = pair.pull_cache(by_request(5), 0)
    assert by_key.error is None if pair.combo.mode == "A" else type(by_key.error) is TypeError
    pair.d.call(actors.refill, "dst", None)
    pair.pull_cache(by_id(cache_id, 1), 0).ok()
    pair.blocks_right([1], [0])
