"""§6: allocated caches between two processes: moved in every mode and transport, and released by pull (mode A)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import llm_datadist as dd
from llm_datadist import CacheKey, LLMStatusCode
from tests.support import actors, allocated
from tests.support.pair import D_ID, P_ID, SEED, SUCCESS, Pair, Shape, by_id, by_request, of_model
from tests.support.peers import Outcome, Peer, Running
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
MIB = 1 << 20
DEVICE_POOL = {"MemPoolConfig": allocated.pool(4 * MIB)}
POOLS = {**DEVICE_POOL, "HostMemPoolConfig": allocated.pool(MIB, 12)}
SHAPE = Shape(tensors=4, dim0=2, stride=1000)


def up(pair: Pair, **more: str) -> Pair:
    return pair.up(timeout_ms=5000, **POOLS, **more)


def source(pair: Pair, kind: str = "slots", name: str = "src", shape: Shape = SHAPE, **how: object) -> int:
    pair.sources[name] = (shape, SEED)
    memory = {"tensors": shape.tensors, "dim0": shape.dim0, "stride": shape.stride}
    return int(pair.p.call(getattr(allocated, kind), name, seed=SEED, **memory, **how))


def slot(batch: int = 0, to: int = 0, nbytes: int = SHAPE.stride) -> list[tuple[int, int, int]]:
    return [(batch * SHAPE.stride, to * SHAPE.stride, nbytes)]


def prefix(number: int, cluster_id: int = P_ID) -> CacheKey:
    return CacheKey(cluster_id, 2**64 - 1, 0, number)


# ---- moving --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["DEVICE", "HOST"])
@pytest.mark.rule("6.35", "6.39")
def test_allocated_caches_are_source_and_destination(pair: Pair, placement: str) -> None:
    up(pair)
    cache_id = source(pair, placement=placement)
    source(pair, "blocks", "paged", model_id=3, placement=placement)
    pair.d.call(allocated.slots, "dst", tensors=4, dim0=2, stride=1000, placement=placement)
    pair.pull_cache(by_id(cache_id, 1), 0).ok()
    pair.right(slot(1))
    pair.d.call(actors.refill, "dst", None)
    pair.d.call(allocated.blocks, "dst2", tensors=4, dim0=2, stride=1000, placement=placement)
    pair.pull_blocks([1, 0], [0, 1], of_model(3), "dst2").ok()
    pair.blocks_right([1, 0], [0, 1], "paged", "dst2")
    pair.unchanged()


def test_pushes_between_allocated_caches(pair_b: Pair) -> None:
    pair = up(pair_b)
    source(pair)
    source(pair, "blocks", "paged", model_id=3)
    to = pair.d.call(allocated.slots, "dst", tensors=4, dim0=2, stride=1000)
    pair.d.call(allocated.blocks, "dst2", model_id=5, tensors=4, dim0=2, stride=1000)
    pair.p.call(actors.push_cache, by_id(to, 1, D_ID), "src", 0)
    pair.right(slot(0, 1))
    pair.p.call(actors.push_blocks, of_model(5, D_ID), "paged", [0], [1])
    pair.blocks_right([0], [1], "paged", "dst2")


class _Ready(dd.LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def _push_layers(w: World, addresses: list[int]) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    configs = [dd.TransferConfig(D_ID, at, range(2), 1) for at in (addresses, [a + 2000 for a in addresses])]
    task = w.dist.cache_manager.transfer_cache_async(w.held["src"].cache, _Ready(), configs)
    return task.synchronize(20_000), task.get_results()


@pytest.mark.rule("5.91", "5.92", "6.54")
def test_layers_are_pushed_to_the_addresses_of_an_allocated_cache(pair_a: Pair) -> None:
    pair = up(pair_a)
    source(pair, keys=[(5, 0), (6, 0)])
    pair.d.call(allocated.slots, "dst", tensors=4, dim0=2, stride=1000)
    addresses = pair.d.call(allocated.addresses, "dst")
    # The second config begins where the tensors end: pages of the pool, but of no cache.
    assert pair.p.call(_push_layers, addresses) == (INVALID, [SUCCESS, INVALID])
    pair.right(slot(1))
    assert pair.p.call(allocated.bound) == [("req", 5), ("req", 6)], "a push releases nothing"


@pytest.mark.rule("6.39")
def test_a_host_allocation_is_remote_accessible(pair_b: Pair) -> None:
    up(pair_b)
    source(pair_b, placement="HOST")
    assert pair_b.p.call(allocated.caches) == [(1, "cache", (), True, True, 0)]


# ---- released by pull ------------------------------------------------------------------------------------


@pytest.fixture
def managed(pair_a: Pair) -> Pair:
    """P has an allocated cache with requests 5 and 6; D a destination."""
    pair_a.up(timeout_ms=5000, **DEVICE_POOL)
    source(pair_a, keys=[(5, 0), (6, 0)])
    pair_a.slot_destination(shape=SHAPE)
    return pair_a


def keys_become(pair: Pair, *wanted: tuple[str, int]) -> bool:
    return bool(pair.p.call(allocated.bound_becomes, wanted) == sorted(wanted))


@pytest.mark.rule("5.8", "6.40", "6.41", "6.44", "6.47", "6.55")
def test_a_pull_releases_its_request_key_and_the_last_one_a_deallocated_cache(managed: Pair) -> None:
    pair = managed
    pair.p.call(allocated.deallocate, "src")
    pair.p.call(allocated.deallocate, "src")
    assert pair.p.call(allocated.caches)[0][:2] == (1, "cache")
    pair.pull_cache(by_request(5), 0).ok()
    pair.right(slot(0))
    pair.pull_cache(by_request(5), 0).expect(GONE, "req_id=5")
    assert keys_become(pair, ("req", 6))
    pair.pull_cache(by_request(6), 1).ok()
    pair.right(slot(0) + slot(1, 1))
    pair.pull_cache(by_request(6), 1).expect(GONE)
    assert pair.p.call(allocated.caches) == []
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("6.40")
def test_a_cache_that_is_not_deallocated_outlives_its_keys(managed: Pair) -> None:
    pair = managed
    for req_id in (5, 6):
        pair.pull_cache(by_request(req_id)).ok()
    assert keys_become(pair)
    pair.pull_cache(by_id(1, 1), 0).ok()
    pair.right(slot(1))
    pair.p.call(allocated.deallocate, "src")
    pair.pull_cache(by_id(1, 1)).expect(GONE)
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("6.48")
def test_a_pull_by_cache_id_releases_the_key_bound_to_that_slot(managed: Pair) -> None:
    managed.pull_cache(by_id(1, 1), 0).ok()
    managed.pull_cache(by_request(6)).expect(GONE)
    assert keys_become(managed, ("req", 5))


@pytest.mark.rule("6.20")
def test_a_placeholder_leaves_its_slot_without_a_key(pair_a: Pair) -> None:
    pair = up(pair_a)
    source(pair, keys=[(2**64 - 1, 0), (6, 0)])
    pair.slot_destination(shape=SHAPE)
    pair.p.call(allocated.deallocate, "src")
    pair.pull_cache(by_id(1, 0), 0).ok()
    assert keys_become(pair, ("req", 6))
    pair.pull_cache(by_request(6), 1).ok()
    pair.right(slot(0) + slot(1, 1))
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("6.50")
def test_layers_are_counted_per_key(managed: Pair) -> None:
    pair = managed
    one = {"tensor_num_per_layer": 2, "src_layer_range": range(1), "dst_layer_range": range(1)}
    for _ in range(3):
        pair.pull_cache(by_request(5), **one).ok()
    pair.pull_cache(by_request(6), src_layer_range=range(1, 2), dst_layer_range=range(1, 2)).ok()
    assert keys_become(pair, ("req", 5), ("req", 6))
    pair.pull_cache(by_request(5), src_layer_range=range(1, 2), dst_layer_range=range(1, 2)).ok()
    pair.pull_cache(by_request(5)).expect(GONE)
    assert keys_become(pair, ("req", 6))


@pytest.mark.rule("6.49")
def test_pull_blocks_by_request_key_releases_it_too(managed: Pair) -> None:
    pair = managed
    pair.destination("dst2", Shape(tensors=4, dim0=8, stride=300))
    pair.pull_blocks([], [1, 3, 5, 7], by_request(5), "dst2").ok()
    pieces = [(k * 300, to * 300, min(300, 1000 - k * 300)) for k, to in enumerate((1, 3, 5, 7))]
    pair.right(pieces, name="dst2")
    pair.pull_blocks([], [1], by_request(5), "dst2").expect(GONE)


@pytest.mark.rule("6.53")
def test_a_failed_pull_releases_nothing(managed: Pair) -> None:
    pair = managed
    pair.slot_destination("small", Shape(tensors=2, dim0=2, stride=1000))
    pair.pull_cache(by_request(5), name="small").expect(INVALID, "4 tensors at the source against 2")
    pair.pull_cache(by_request(5), 0, 1001).expect(INVALID)
    pair.pull_cache(by_request(5), 0).ok()
    pair.right(slot(0))


@pytest.mark.rule("6.14", "6.41", "6.51", "6.52", "6.57", "6.58", "6.59", "6.60")
def test_registered_caches_and_prefix_keys_are_not_released(managed: Pair) -> None:
    pair = managed
    pair.slots("mine", SHAPE, keys=[(8, 0)])
    source(pair, name="shared", prefixes=[7], keys=[(9, 0)])
    pair.p.call(allocated.deallocate, "shared")
    for _ in range(2):
        pair.pull_cache(by_request(8), 0).ok()
        pair.pull_cache(prefix(7), 1).ok()
        pair.pull_cache(by_id(3, 1), 1).ok()
    pair.pull_cache(by_request(9)).ok()
    assert keys_become(pair, ("req", 5), ("req", 6), ("req", 8), ("prefix", 7))
    pair.p.call(allocated.remove_key, prefix(7, 99))
    pair.pull_cache(prefix(7)).expect(GONE, "prefix_id=7")
    pair.p.call(allocated.remove_key, by_request(8, 0, 99))
    pair.p.call(allocated.remove_key, by_request(8, 0, 99))
    pair.pull_cache(by_request(8)).expect(GONE)
    assert [c[0] for c in pair.p.call(allocated.caches)] == [1, 2]


@pytest.mark.rule("2.20", "5.48", "6.57")
def test_prefix_keys_serve_pull_blocks_and_exclude_a_request_id(managed: Pair) -> None:
    pair = managed
    source(pair, name="shared", prefixes=[7])
    pair.destination("dst2", Shape(tensors=4, dim0=8, stride=300))
    for _ in range(2):
        pair.pull_blocks([], [2], prefix(7), "dst2").ok()
    pair.right([(0, 600, 300)], "shared", "dst2")
    pair.pull_cache(CacheKey(P_ID, 5, 0, 7)).expect(INVALID, "both a req_id and a prefix_id")
    pair.pull_cache(CacheKey(P_ID, 2**64 - 1)).expect(INVALID, "neither a req_id nor a prefix_id")


@pytest.mark.rule("5.10", "5.61")
def test_in_mode_b_keys_stay(pair_b: Pair) -> None:
    pair = up(pair_b)
    source(pair, keys=[(5, 0)])
    pair.d.call(allocated.blocks, "dst", tensors=4, dim0=8, stride=1000)
    pair.p.call(allocated.deallocate, "src")
    for block in range(3):
        pair.pull_blocks([], [block], by_request(5)).ok()
    pair.right([(0, block * 1000, 1000) for block in range(3)])
    pair.p.call(allocated.remove_key, by_request(5))
    pair.pull_blocks([], [4], by_request(5)).expect(GONE)
    assert pair.p.call(allocated.all_free)


def test_c2_many_threads_allocate_pull_and_release_at_once(pair_a: Pair) -> None:
    pair = up(pair_a)

    def requests(first: int) -> bool:
        right = True
        for req_id in range(first, first + 12):
            pair.p.call(allocated.numbered, req_id)
            right = pair.d.call(allocated.pull_numbered, P_ID, req_id) and right
        return right

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(requests, range(1, 200, 33)))
    assert pair.p.call(allocated.all_free) and pair.d.call(allocated.all_free)
    assert pair.p.call(allocated.caches) == pair.d.call(allocated.caches) == []


# ---- withdrawn by the owner --------------------------------------------------------------------------------


def _read(pair: Pair, cache_id: int, kind: str) -> Outcome:
    if kind == "slots":
        return pair.pull_cache(by_id(cache_id, 1), 0)
    return pair.pull_blocks([1], [0], of_model(3))


@pytest.mark.parametrize("kind", ["slots", "blocks"])
@pytest.mark.parametrize("how", ["deallocate", "unregister"])
@pytest.mark.rule("6.28", "6.42")
def test_s1_what_is_deallocated_is_gone_for_peers_at_once(pair: Pair, kind: str, how: str) -> None:
    up(pair)
    pair.d.call(getattr(allocated, kind), "dst", tensors=4, dim0=2, stride=1000)
    for _ in range(10):
        cache_id = source(pair, kind, **({"model_id": 3} if kind == "blocks" else {}))
        module = allocated if how == "deallocate" else actors
        pair.p.call(getattr(module, how), "src")
        _read(pair, cache_id, kind).expect(GONE)
        pair.unchanged()
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("6.27")
def test_unregister_frees_a_cache_that_keys_hold(managed: Pair) -> None:
    managed.p.call(allocated.deallocate, "src")
    managed.p.call(actors.unregister, "src")
    assert managed.p.call(allocated.all_free)
    managed.pull_cache(by_request(5)).expect(GONE)
    managed.unchanged()


# ---- readers that hold a lease --------------------------------------------------------------------------------


def holds_a_lease(peer: Peer, key: object) -> Running:
    """A pull of that peer, granted and not begun; ``allocated.open_gate`` lets it go on."""
    peer.call(allocated.close_gate)
    running = peer.start(actors.pull_cache, key, "dst", 0)
    assert peer.call(allocated.gate_reached)
    return running


@pytest.fixture
def impatient(pair_a: Pair) -> Pair:
    """P waits 0.5 s for readers, D has 20 s for a pull; P's pool has room for one cache."""
    pair_a.up(link=False, timeout_ms=500, MemPoolConfig=allocated.pool(4 << 16))
    pair_a.d.call(actors.finalize)
    pair_a.d.call(actors.up, D_ID, actors.options("A", pair_a.combo.backend, None, 20_000))
    pair_a.link()
    source(pair_a, keys=[(5, 0)])
    pair_a.slot_destination(shape=SHAPE)
    return pair_a


@pytest.mark.rule("5.6", "6.29", "6.98")
def test_a_deallocation_waits_for_a_reader_that_holds_a_lease(impatient: Pair) -> None:
    pair = impatient
    pair.p.call(allocated.remove_key, by_request(5))
    reading = holds_a_lease(pair.d, by_id(1))
    assert pair.p.call(allocated.caches)[0][5] == 1
    ending = pair.p.start(allocated.deallocate, "src")
    actors.pause(0.2)
    assert not ending.done()
    pair.d.call(allocated.open_gate)
    reading.result()
    ending.result()
    pair.right(slot(0))
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("6.31", "6.33")
def test_a_deallocation_cuts_off_a_reader_that_takes_longer_than_the_timeout(impatient: Pair) -> None:
    pair = impatient
    pair.p.call(allocated.remove_key, by_request(5))
    reading = holds_a_lease(pair.d, by_id(1))
    ended = pair.p.attempt(allocated.deallocate, "src")
    assert ended.took.about(0.5), ended
    assert pair.p.call(allocated.all_free)
    pair.d.call(allocated.open_gate)
    reading.outcome().expect(GONE)
    pair.unchanged()


@pytest.mark.rule("6.56")
def test_one_that_held_its_lease_finishes_after_the_key_was_released(
    impatient: Pair, spawn: Callable[[], Peer]
) -> None:
    pair, third = impatient, spawn()
    third.call(actors.up, 3, actors.options("A", pair.combo.backend))
    assert third.call(actors.link, [(P_ID, pair.address)])[0] == SUCCESS
    third.call(actors.slot_cache, "dst", tensors=4, dim0=2, stride=1000)
    pair.p.call(allocated.deallocate, "src")
    reading = holds_a_lease(pair.d, by_request(5))
    third.call(actors.pull_cache, by_request(5), "dst")
    assert pair.p.call(allocated.bound_becomes, ()) == []
    assert third.attempt(actors.pull_cache, by_request(5), "dst").code == GONE
    actors.pause(0.7)  # longer than P waits when it cuts off
    assert pair.p.call(allocated.free_nbytes) == 0, "memory that is being read was given away"
    pair.d.call(allocated.open_gate)
    reading.result()
    pair.right(slot(0))
    assert pair.p.call(allocated.all_free)


@pytest.mark.rule("5.14", "6.33")
def test_a_reader_in_mode_b_that_has_found_the_cache_notices_that_it_went(pair_b: Pair) -> None:
    pair = up(pair_b)
    source(pair)
    pair.slot_destination(shape=SHAPE)
    reading = holds_a_lease(
        pair.d, by_id(1)
    )  # no lease in this mode: it has found the cache in its own table
    pair.p.call(allocated.deallocate, "src")
    source(pair)  # on the same pages
    pair.d.call(allocated.open_gate)
    reading.outcome().expect(GONE)
    pair.unchanged()


def test_finalize_does_not_wait_for_a_reader(impatient: Pair) -> None:
    pair = impatient
    pair.p.call(allocated.deallocate, "src")
    reading = holds_a_lease(pair.d, by_request(5))
    pair.p.call(allocated.remove_key, by_request(5))
    assert pair.p.attempt(actors.finalize).took.within(2)
    pair.d.call(allocated.open_gate)
    assert reading.outcome().code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)
    pair.unchanged()
