"""Contract 2 where bytes move: dims, descriptions used again, keys that name a cluster, handles of an earlier life."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.pair import D_ID, P_ID, Pair, Shape, by_id, by_request, of_model
from tests.support.pool import Spawner
from tests.support.world import World

GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
SHAPE = Shape(tensors=2, dim0=8, stride=1024)


def _desc_with_moved_batch_dim(w: World, name: str, seed: int | None, batch_dim: int) -> Any:
    """The memory of ``actors.make`` as a tensor of three dims, the batch dim moved; its batch size."""
    actors.make(w, name, tensors=SHAPE.tensors, dim0=SHAPE.dim0, stride=SHAPE.stride, seed=seed)
    desc = dd.CacheDesc(
        SHAPE.tensors, [SHAPE.dim0, 4, SHAPE.stride // 4], dd.DataType.DT_UINT8, batch_dim_index=batch_dim
    )
    w.held[name].desc = desc
    return desc.batch_size


@pytest.mark.rule("2.12", "2.13")
@pytest.mark.parametrize("kind", ["blocks", "slots"])
def test_dim_0_counts_in_transfers_wherever_the_batch_dim_is(pair: Pair, kind: str) -> None:
    pair.up()
    pair.sources["src"] = (SHAPE, 11)
    assert pair.p.call(_desc_with_moved_batch_dim, "src", 11, 1) == 4
    assert pair.d.call(_desc_with_moved_batch_dim, "dst", None, 2) == 256
    func = actors.blocks_cache if kind == "blocks" else actors.slot_cache
    more = {"model_id": 0} if kind == "blocks" else {}
    cache_id = pair.p.call(func, "src", **more)
    pair.d.call(func, "dst")
    if kind == "blocks":
        pair.pull_blocks([7], [5]).ok()
    else:
        pair.pull_cache(by_id(cache_id, 7), 5).ok()
    pair.blocks_right([7], [5])


def _register_all_with_one_desc(w: World, seed: int | None) -> tuple[int, int]:
    """A blocks cache and two contiguous ones of one description, which is changed afterwards: theirs is not."""
    manager = w.dist.cache_manager
    desc = dd.CacheDesc(SHAPE.tensors, [SHAPE.dim0, SHAPE.stride], dd.DataType.DT_UINT8)
    for at, name in enumerate(("blocks", "one", "two")):
        actors.make(w, name, **SHAPE.memory(), seed=None if seed is None else seed + at)
    blocks, one, two = (w.held[name] for name in ("blocks", "one", "two"))
    blocks.cache = manager.register_blocks_cache(desc, blocks.addresses, dd.BlocksCacheKey(0))
    one.cache = manager.register_cache(desc, one.addresses)
    two.cache = manager.register_cache(desc, two.addresses)
    desc.update_dim(0, 1)
    kept = [c.desc.shape for c in manager.caches()] + [h.cache.cache_desc.shape for h in (blocks, one, two)]
    assert kept == [[SHAPE.dim0, SHAPE.stride]] * 6
    return one.cache.cache_id, two.cache.cache_id


@pytest.mark.rule("2.14")
def test_one_description_serves_many_caches_of_any_kind(pair: Pair) -> None:
    pair.up()
    ids = pair.p.call(_register_all_with_one_desc, 31)
    pair.d.call(_register_all_with_one_desc, None)
    for at, name in enumerate(("blocks", "one", "two")):
        pair.sources[name] = (SHAPE, 31 + at)
    pair.pull_blocks([7], [6], name="blocks").ok()
    for cache_id, name in zip(ids, ("one", "two"), strict=True):
        pair.pull_cache(by_id(cache_id, 7), 6, name=name).ok()
    for name in ("blocks", "one", "two"):
        pair.blocks_right([7], [6], source=name, name=name)


def _register_under_cluster(w: World, cluster_id: int) -> None:
    manager = w.dist.cache_manager
    for name, seed in (("blocks", 5), ("slots", 6)):
        actors.make(w, name, **SHAPE.memory(), seed=seed)
    blocks, slots = w.held["blocks"], w.held["slots"]
    blocks.cache = manager.register_blocks_cache(
        blocks.desc, blocks.addresses, dd.BlocksCacheKey(cluster_id, 3)
    )
    slots.cache = manager.register_cache(slots.desc, slots.addresses, [dd.CacheKey(cluster_id, 9, 3)])


@pytest.mark.rule("2.27")
@pytest.mark.parametrize("cluster_id", [0, D_ID, 77, 2**64 - 1])
def test_the_cluster_of_a_key_means_nothing_when_registering(pair_a: Pair, cluster_id: int) -> None:
    pair = pair_a.up()
    pair.p.call(_register_under_cluster, cluster_id)
    pair.sources |= {"blocks": (SHAPE, 5), "slots": (SHAPE, 6)}
    pair.destination()
    pair.slot_destination("slot")
    pair.pull_blocks([1], [2], of_model(3)).ok()
    pair.blocks_right([1], [2], "blocks")
    pair.pull_cache(by_request(9, 3), 4, name="slot").ok()
    pair.blocks_right([0], [4], "slots", "slot")


@pytest.mark.rule("2.28")
def test_the_cluster_of_a_key_selects_the_peer_of_a_transfer(spawn: Spawner, pair: Pair) -> None:
    """Two peers hold the same model id and cache id; each call reaches the one that its key names."""
    pair.up()
    other = spawn()
    address = other.call(actors.up, 3, actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0"))
    pair.d.call(actors.link, [(3, address)])
    pair.d.call(actors.blocks_cache, "out", seed=9)
    for peer, cluster_id in ((pair.p, P_ID), (other, 3)):
        peer.call(actors.blocks_cache, "src", seed=20 + cluster_id, model_id=0)
        peer.call(actors.blocks_cache, "into", model_id=1)
        pair.destination(f"from {cluster_id}")
        pair.pull_blocks([1], [2], of_model(0, cluster_id), f"from {cluster_id}").ok()
        pair.sources["src"] = (Shape(), 20 + cluster_id)
        pair.blocks_right([1], [2], name=f"from {cluster_id}")
    if pair.combo.mode == "B":
        pair.d.call(actors.push_blocks, of_model(1, 3), "out", [1], [2])
        pair.unchanged("into", pair.p)
        pieces = [([1024], [2048], 1024)]
        assert not other.call(actors.compare, "into", seed=9, src_tensor_nbytes=8192, pieces=pieces)


def _begin_again(w: World, values: dict[str, str]) -> Any:
    w.dist.finalize()
    w.dist.init(values)
    return w.dist.listen_address


def _use_old_handles(w: World) -> dict[str, Any]:
    """The code of each call that is given a handle of the earlier life; a new cache has the same id."""
    manager = w.dist.cache_manager
    blocks, slots = w.held["blocks"].cache, w.held["slots"].cache
    actors.blocks_cache(w, "new blocks")
    actors.slot_cache(w, "new slots")
    assert w.held["new blocks"].cache.cache_id == blocks.cache_id == 1
    key, by = dd.BlocksCacheKey(P_ID, 0), dd.CacheKeyByIdAndIndex(P_ID, 1)
    calls = {
        "pull_blocks": lambda: manager.pull_blocks(key, blocks, [0], [0]),
        "pull_cache": lambda: manager.pull_cache(by, slots),
        "pull_blocks_async": lambda: manager.pull_blocks_async(key, blocks, [0], [0]),
        "copy_blocks": lambda: manager.copy_blocks(blocks, {0: [1]}),
        "copy_cache": lambda: manager.copy_cache(slots, slots, 0, 1),
    }
    if w.extras["mode"] == "B":
        calls["push_blocks"] = lambda: manager.push_blocks(key, blocks, [0], [0])
        calls["push_cache"] = lambda: manager.push_cache(by, slots)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "done"
        except dd.LLMException as exc:
            found[name] = exc.status_code
    return found


def _remember(w: World, mode: str) -> None:
    w.extras["mode"] = mode


@pytest.mark.rule("3.11", "3.12")
def test_handles_of_an_earlier_life_are_refused_and_ids_start_again(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.d.call(_remember, pair.combo.mode)
    assert pair.d.call(actors.blocks_cache, "blocks", own=True) == 1
    assert pair.d.call(actors.slot_cache, "slots", own=True) == 2
    pair.d.call(_begin_again, actors.options(pair.combo.mode, pair.combo.backend))
    pair.link()
    found = pair.d.call(_use_old_handles)
    assert set(found.values()) == {GONE}, found
    for name in ("blocks", "slots", "new blocks", "new slots"):
        pair.unchanged(name)
    pair.pull_blocks(np.array([1]), [2], name="new blocks").ok()
    pair.blocks_right([1], [2], name="new blocks")
