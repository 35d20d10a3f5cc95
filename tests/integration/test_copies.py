"""§6: copy_cache, copy_blocks and swap_blocks move real memory, and never fall over a page that is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import Cache, CacheManager, LLMStatusCode, Placement
from llm_datadist._engine import copying
from tests.support import actors, allocated
from tests.support.memory import FILL, PAGE, Mapping
from tests.support.pool import Spawner
from tests.support.world import World, wait_until

MIB = 1 << 20
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = LLMStatusCode.LLM_FAILED

Memory = dict[str, Any]


@pytest.fixture
def dist() -> Iterator[dd.LLMDataDist]:
    made = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    pools = {"MemPoolConfig": allocated.pool(8 * MIB), "HostMemPoolConfig": allocated.pool(8 * MIB)}
    made.init(actors.options("A", "auto", timeout_ms=300, **pools))
    yield made
    made.finalize()


@pytest.fixture
def manager(dist: dd.LLMDataDist) -> CacheManager:
    return dist.cache_manager


def rows(cache: Cache) -> list[Any]:
    """Each tensor as (dim 0, stride)."""
    desc = cache.cache_desc
    views = [allocated.PoolView(a, desc.size).view(0, desc.size) for a in cache.tensor_addrs]
    return [v.reshape(desc.shape[0], -1) for v in views]


def filled(cache: Cache, seed: int = 1) -> Cache:
    for at, tensor in enumerate(rows(cache)):
        tensor[:] = np.random.default_rng(seed + at).integers(0, 256, tensor.shape, dtype=np.uint8)
    return cache


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    made = Mapping(8 * PAGE)
    made.view(0, 8 * PAGE)[:] = FILL
    yield made
    made.close()


@pytest.mark.rule("6.76", "6.79", "6.81")
def test_copy_cache(manager: CacheManager) -> None:
    src = filled(manager.allocate_cache(allocated.desc_of(3, 4, 100)))
    dst = manager.allocate_cache(allocated.desc_of(3, 2, 60, "HOST"))
    manager.copy_cache(dst, src, 1, 3, 10, 50)
    for to, there in zip(rows(dst), rows(src), strict=True):
        assert np.array_equal(to[1, 10:], there[3, 10:60])
        assert not to[0].any() and not to[1, :10].any()
    manager.copy_cache(src, dst, src_batch_index=1, req_id=7)
    for to, there in zip(rows(src), rows(dst), strict=True):
        assert np.array_equal(to[0, :60], there[1])
    with pytest.raises(dd.ParamInvalidError, match="a slot of cache 1 has 100 bytes, one of cache 2 60"):
        manager.copy_cache(dst, src)
    with pytest.raises(dd.ParamInvalidError, match="overlaps"):
        manager.copy_cache(src, src)


@pytest.mark.rule("5.137", "6.84", "6.85")
def test_copy_blocks_as_if_all_at_once(manager: CacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_BUFFER_NBYTES", 3000)  # some steps, of more than one tensor
    cache = filled(manager.allocate_blocks_cache(allocated.desc_of(7, 16, 333)))
    before = [t.copy() for t in rows(cache)]
    manager.copy_blocks(cache, {0: [1, 5], 1: [0], 2: [3], 3: [2, 9], 4: [], 8: [8], 15: (14,)})
    for now, then in zip(rows(cache), before, strict=True):
        want = then.copy()
        want[[1, 5, 0, 3, 2, 9, 14]] = then[[0, 0, 1, 2, 3, 3, 15]]
        assert np.array_equal(now, want)
    manager.copy_blocks(cache, {})


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.rule("5.137", "6.90")
def test_swap_blocks_with_a_cpu_cache(manager: CacheManager, to_host: bool, mapping: Mapping) -> None:
    device = filled(manager.allocate_blocks_cache(allocated.desc_of(2, 8, 1000)), 1)
    desc = allocated.desc_of(2, 4, 1000, "HOST")
    cpu = Cache.create_cpu_cache(desc, [mapping.address + 1, mapping.address + 4 * PAGE])
    filled(cpu, 5)
    src, dst = (device, cpu) if to_host else (cpu, device)
    before = [t.copy() for t in rows(dst)]
    manager.swap_blocks(src, dst, {0: 3, 3: 1})
    for now, then, there in zip(rows(dst), before, rows(src), strict=True):
        then[[3, 1]] = there[[0, 3]]
        assert np.array_equal(now, then)
    manager.swap_blocks(src, dst, {})
    manager.copy_blocks(cpu, {0: [1]})
    assert np.array_equal(rows(cpu)[0][0], rows(cpu)[0][1])


@pytest.mark.rule("6.90")
def test_swap_blocks_between_allocated_caches(manager: CacheManager) -> None:
    device = filled(manager.allocate_blocks_cache(allocated.desc_of(2, 8, 1000)))
    host = manager.allocate_blocks_cache(allocated.desc_of(2, 8, 1000, "HOST"))
    manager.swap_blocks(device, host, {at: 7 - at for at in range(8)})
    for to, there in zip(rows(host), rows(device), strict=True):
        assert np.array_equal(to, there[::-1])


def test_a_large_copy_is_split_and_right(manager: CacheManager) -> None:
    src = filled(manager.allocate_cache(allocated.desc_of(3, 1, MIB + 5)))
    dst = manager.allocate_cache(allocated.desc_of(3, 1, MIB + 5, "HOST"))
    manager.copy_cache(dst, src)
    assert all(np.array_equal(a, b) for a, b in zip(rows(src), rows(dst), strict=True))


# ---- refused -------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[CacheManager, Cache], None]] = {
    "copy_cache dst": lambda m, c: m.copy_cache(c, m.allocate_cache(c.cache_desc)),
    "copy_cache src": lambda m, c: m.copy_cache(m.allocate_cache(c.cache_desc), c),
    "copy_blocks": lambda m, c: m.copy_blocks(c, {0: [1]}),
    "swap_blocks src": lambda m, c: m.swap_blocks(c, m.allocate_blocks_cache(allocated.desc_of(2, 8, 64, "HOST")), {}),
    "swap_blocks dst": lambda m, c: m.swap_blocks(m.allocate_blocks_cache(allocated.desc_of(2, 8, 64, "HOST")), c, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_cache_that_is_not_registered_any_more(manager: CacheManager, name: str) -> None:
    make = manager.allocate_cache if "cache" in name else manager.allocate_blocks_cache
    cache = make(allocated.desc_of(2, 8, 64))
    manager.unregister_cache(cache.cache_id)
    with pytest.raises(dd.CacheNotExistError, match=f"cache {cache.cache_id} ") as caught:
        CALLS[name](manager, cache)
    assert caught.value.status_code == GONE


def test_a_cpu_cache_is_no_cache_to_pull_into_or_to_deallocate(
    manager: CacheManager, mapping: Mapping
) -> None:
    cpu = Cache.create_cpu_cache(allocated.desc_of(1, 1, 64, "HOST"), [mapping.address])
    with pytest.raises(dd.CacheNotExistError):
        manager.pull_blocks(dd.BlocksCacheKey(2), cpu, [0], [0])
    manager.deallocate_blocks_cache(cpu)
    with pytest.raises(dd.ParamInvalidError, match="has placement HOST and dst"):
        manager.swap_blocks(cpu, cpu, {0: 0})


def test_a_cpu_cache_whose_memory_is_not_mapped_is_refused(manager: CacheManager, mapping: Mapping) -> None:
    device = filled(manager.allocate_blocks_cache(allocated.desc_of(2, 2, PAGE)))
    cpu = Cache.create_cpu_cache(allocated.desc_of(2, 2, PAGE, "HOST"), [mapping.address, 0x1000])
    for call in (
        lambda: manager.swap_blocks(device, cpu, {0: 0}),
        lambda: manager.swap_blocks(cpu, device, {0: 0}),
    ):
        with pytest.raises(dd.ParamInvalidError, match=r"addrs\[1\] is 0x1000: the 8192 bytes"):
            call()
    assert (mapping.view(0, 8 * PAGE) == FILL).all()


def test_memory_that_was_unmapped_is_an_error_and_no_crash(manager: CacheManager) -> None:
    mapping = Mapping(4 * PAGE)
    mine = manager.register_cache(allocated.desc_of(1, 2, 2 * PAGE), [mapping.address])
    blocks = manager.register_blocks_cache(allocated.desc_of(1, 4, PAGE), [mapping.address])
    other = manager.allocate_cache(allocated.desc_of(1, 2, 2 * PAGE))
    mapping.close()
    with pytest.raises(dd.LLMException, match=r"copy_cache: address .* cannot be read.*unregister") as source:
        manager.copy_cache(other, mine)
    with pytest.raises(dd.ParamInvalidError, match="copy_cache: destination memory cannot be written"):
        manager.copy_cache(mine, other)
    with pytest.raises(dd.ParamInvalidError, match="copy_blocks: destination memory cannot be written"):
        manager.copy_blocks(blocks, {0: [1], 1: [0]})
    assert source.value.status_code == FAILED
    assert source.value.__cause__ is not None


# ---- copies are flights -----------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(reached, go on): a copy stops before its first byte."""
    reached, go_on = threading.Event(), threading.Event()
    wait = copying.LocalRead.wait

    def late(self: Any, *, deadline: float) -> Any:
        reached.set()
        assert go_on.wait(20)
        return wait(self, deadline=deadline)

    monkeypatch.setattr(copying.LocalRead, "wait", late)
    yield reached, go_on
    go_on.set()


def is_cut(state: Any) -> bool:
    """Whether the copy is told to end; waits for it."""
    return wait_until(lambda: bool(state.flights.where(lambda flight: flight.error is not None)))


def started(call: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except dd.LLMException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("which", ["src", "dst"])
@pytest.mark.rule("6.30", "6.31", "6.32")
def test_unregister_waits_for_a_copy_and_then_cuts_it_off(
    dist: dd.LLMDataDist, held: tuple[threading.Event, threading.Event], which: str
) -> None:
    manager = dist.cache_manager
    src = filled(manager.allocate_cache(allocated.desc_of(1, 1, MIB)))
    dst = manager.allocate_cache(allocated.desc_of(1, 1, MIB))
    copy, errors = started(lambda: manager.copy_cache(dst, src))
    assert held[0].wait(10)
    cache = src if which == "src" else dst
    state = dist._engine._state
    ending, _ = started(lambda: manager.deallocate_cache(cache))
    assert is_cut(state)
    ending.join(0.1)
    assert ending.is_alive(), "it did not wait for the last byte"
    held[1].set()
    ending.join(10)
    copy.join(10)
    assert [e.status_code for e in errors] == [GONE]  # type: ignore[attr-defined]
    assert not rows(dst)[0].any()


@pytest.mark.rule("6.43")
def test_deallocating_a_blocks_cache_waits_for_a_copy(
    manager: CacheManager, held: tuple[threading.Event, threading.Event]
) -> None:
    cache = filled(manager.allocate_blocks_cache(allocated.desc_of(1, 2, PAGE)))
    copy, errors = started(lambda: manager.copy_blocks(cache, {0: [1]}))
    assert held[0].wait(10)
    ending, _ = started(lambda: manager.deallocate_blocks_cache(cache))
    ending.join(0.1)
    assert ending.is_alive()
    held[1].set()
    copy.join(10)
    ending.join(10)
    assert not ending.is_alive() and not errors
    assert manager.pool_info(Placement.DEVICE).allocations == 0


def test_finalize_unmaps_a_pool_only_when_nothing_writes_there(
    dist: dd.LLMDataDist, held: tuple[threading.Event, threading.Event]
) -> None:
    src = filled(dist.cache_manager.allocate_cache(allocated.desc_of(1, 1, MIB)))
    dst = dist.cache_manager.allocate_cache(allocated.desc_of(1, 1, MIB))
    copy, errors = started(lambda: dist.cache_manager.copy_cache(dst, src))
    assert held[0].wait(10)
    state = dist._engine._state
    ending, _ = started(dist.finalize)
    assert is_cut(state)
    ending.join(0.2)
    assert ending.is_alive(), "it did not wait for the last byte"
    assert not rows(dst)[0].any()
    held[1].set()
    copy.join(10)
    ending.join(10)
    assert [e.status_code for e in errors] == [LLMStatusCode.LLM_ENGINE_FINALIZED]  # type: ignore[attr-defined]


def _finalize_under_a_copy(w: World) -> tuple[bool, bool]:
    """A copy that does not end while finalize waits; whether its pool was mapped then, and is in the end."""
    gate = threading.Event()
    wait = copying.LocalRead.wait
    copying.LocalRead.wait = lambda self, *, deadline: gate.wait(20) and wait(self, deadline=deadline)  # type: ignore
    manager = w.dist.cache_manager
    src, dst = (manager.allocate_cache(allocated.desc_of(1, 1, MIB)) for _ in range(2))
    copy, _ = started(lambda: manager.copy_cache(dst, src))
    w.dist.finalize()
    mapped = "llm-datadist-pool" in Path("/proc/self/maps").read_text()
    gate.set()
    copy.join(10)
    return mapped, copy.is_alive()


def test_finalize_leaves_the_addresses_taken_when_a_copy_does_not_end(spawn: Spawner) -> None:
    peer = spawn(env={"PYTHONHASHSEED": "0"})  # one of its own: it keeps the mapping
    peer.call(actors.up, 1, actors.options("A", "auto", MemPoolConfig=allocated.pool(8 * MIB)))
    outcome = peer.attempt(_finalize_under_a_copy)
    assert outcome.ok() == (True, False)
    assert outcome.took.within(2)


@pytest.mark.rule("6.97")
def test_two_looks_at_the_caches_are_equal(manager: CacheManager) -> None:
    manager.allocate_blocks_cache(allocated.desc_of(1, 1, 1), dd.BlocksCacheKey(9, 2))
    manager.allocate_cache(
        allocated.desc_of(1, 2, 1, "HOST"), [dd.CacheKey(9, 2**64 - 1), dd.CacheKey(9, 3, 4)]
    )
    infos = manager.caches()
    assert infos == manager.caches()
    assert [(i.cache_id, i.kind, i.keys, i.allocated, i.remote_accessible, i.leases) for i in infos] == [
        (1, "blocks", (dd.BlocksCacheKey(1, 2),), True, True, 0),
        (2, "cache", (dd.CacheKey(1, 3, 4),), True, True, 0),
    ]


@pytest.mark.rule("6.35")
def test_placements_are_those_of_the_desc(manager: CacheManager) -> None:
    infos = [manager.allocate_blocks_cache(allocated.desc_of(1, 1, 1, p.name)).cache_desc for p in Placement]
    assert [i.placement for i in infos] == list(Placement)
