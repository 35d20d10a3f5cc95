"""§6 the life of allocated caches against a model: deallocated and no key left, and nobody holds a lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist._core.leases import Lease
from llm_datadist._core.options import Options, parse_options
from llm_datadist._core.registry import KeyName, key_name_of
from llm_datadist._engine.allocating import Allocator
from llm_datadist._engine.catalog import Catalog
from llm_datadist._engine.state import State
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.enums import Placement
from llm_datadist.keys import BlocksCacheKey, CacheKey
from llm_datadist.status import OutOfMemoryError, ParamInvalidError
from tests.support.calls import KEPT

pytestmark = pytest.mark.rule("6.14", "6.40", "6.44", "6.46", "6.50", "6.67", "6.75")

PAGE = 1 << 10
PAGES = 12
NONE = 2**64 - 1
TENSORS, SLOTS = 2, 2
KEYS = [CacheKey(9, r) for r in (1, 2, 3)] + [CacheKey(9, NONE, 0, 7), CacheKey(9, NONE)]


def options(page_shift: int = 10) -> Options:
    pool = f'{{"memory_size": {PAGES << page_shift}, "page_shift": {page_shift}}}'
    return parse_options({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": pool})


class HeldJobs:
    """Stands in for the workers: runs a job when its time has come, so that nothing waits."""

    def __init__(self) -> None:
        self.jobs: dict[object, Callable[[], None]] = {}

    def submit(self, key: object, job: Callable[[], None]) -> None:
        self.jobs[key] = job


@dataclass
class Alive:
    """A cache of the model. ``keys``: by name the tensors that were pulled; request and prefix keys alike."""

    cache: Cache
    pages: int
    keys: dict[KeyName, set[int]] = field(default_factory=dict)
    owned: bool = True


class AllocatorMachine(RuleBasedStateMachine):
    """Model: caches that can be found, the pages that are out, and who still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State(9, options(), {})
        self.state.pools.open()
        self.workers: Any = HeldJobs()
        self.state.workers = self.workers
        self.catalog = Catalog(self.state)
        self.allocator = Allocator(self.state, self.catalog)
        self.alive: dict[int, Alive] = {}
        self.ending: dict[int, int] = {}  # pages that wait for the last lease
        self.leases: list[tuple[Lease, KeyName | None]] = []
        self.handles: list[Cache] = []

    def teardown(self) -> None:
        self.state.pools.close()
        self.state.slab.close_descriptor()

    def pages_out(self) -> int:
        return sum(a.pages for a in self.alive.values()) + sum(self.ending.values())

    # ---- rules ------------------------------------------------------------------------------------------

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3), nbytes=st.sampled_from([1, 600, 1100]))
    def allocate(self, keys: list[CacheKey], nbytes: int) -> None:
        desc = CacheDesc(TENSORS, [SLOTS, nbytes], DataType.DT_INT8)
        pages = TENSORS * -(-SLOTS * nbytes // PAGE)
        names = [n for n in map(key_name_of, keys) if n is not None]
        bound = {name for a in self.alive.values() for name in a.keys}
        if len(keys) > SLOTS or len(set(names)) < len(names) or bound & set(names):
            with pytest.raises(ParamInvalidError):
                self.allocator.allocate(desc, keys, is_blocks=False, call=KEPT)
            return
        try:
            cache = self.allocator.allocate(desc, keys, is_blocks=False, call=KEPT)
        except OutOfMemoryError:
            largest = self.state.pools.info(Placement.DEVICE).largest_free_nbytes // PAGE
            assert pages > PAGES - self.pages_out() or largest < pages
            return
        desc.update_dim(0, 77)
        assert cache.cache_desc.shape == [SLOTS, nbytes]
        self.alive[cache.cache_id] = Alive(cache, pages, {name: set() for name in names})
        self.handles.append(cache)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def deallocate(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.handles))
        self.end_leases_if_it_goes(cache.cache_id)
        self.allocator.deallocate(cache, is_blocks=False, call=KEPT)
        alive = self.alive.get(cache.cache_id)
        if alive is not None:
            alive.owned = False
            self.settle(cache.cache_id)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        cache_id = data.draw(st.sampled_from(self.handles)).cache_id
        self.end_leases(cache_id)
        self.catalog.unregister(cache_id, KEPT)
        self.alive.pop(cache_id, None)

    @rule(key=st.sampled_from(KEYS))
    def remove_key(self, key: CacheKey) -> None:
        self.allocator.remove_key(CacheKey(1, key.req_id, key.model_id, key.prefix_id))
        self.drop_key(key_name_of(key))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """A peer resolves a key, or a slot by id."""
        alive = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        name = data.draw(st.sampled_from([None, *alive.keys]))
        record = self.state.registry.get(alive.cache.cache_id)
        assert record is not None
        key = name if name is not None and name.kind == "req" else None
        self.leases.append((self.state.leases.grant(b"peer", record, 1e18, key), key))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ok=st.booleans(), first=st.integers(0, 1), stop=st.integers(1, 2))
    def release(self, data: st.DataObject, ok: bool, first: int, stop: int) -> None:
        """The peer is done with some tensors; what Responder.release does."""
        lease, key = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.state.leases.end(lease)
        if ok and key is not None:
            self.allocator.pulled(lease.record, key, first, stop)
            alive = self.alive.get(lease.record.cache_id)
            if alive is not None and key in alive.keys:
                alive.keys[key] |= set(range(first, stop))
                if len(alive.keys[key]) == TENSORS:
                    self.drop_key(key)
        self.run_jobs()

    # ---- the model ----------------------------------------------------------------------------------------

    def drop_key(self, name: KeyName | None) -> None:
        for cache_id, alive in list(self.alive.items()):
            if name in alive.keys:
                del alive.keys[name]
                self.settle(cache_id)

    def settle(self, cache_id: int) -> None:
        alive = self.alive[cache_id]
        if not alive.owned and not alive.keys:
            del self.alive[cache_id]
            if self.leased(cache_id):
                self.ending[cache_id] = alive.pages

    def leased(self, cache_id: int) -> bool:
        return any(lease.record.cache_id == cache_id for lease, _ in self.leases)

    def end_leases(self, cache_id: int) -> None:
        """Calls that wait for readers would wait; here they have finished before."""
        for entry in [e for e in self.leases if e[0].record.cache_id == cache_id]:
            self.state.leases.end(entry[0])
            self.leases.remove(entry)
        self.run_jobs()

    def end_leases_if_it_goes(self, cache_id: int) -> None:
        alive = self.alive.get(cache_id)
        if alive is not None and not alive.keys:
            self.end_leases(cache_id)

    def run_jobs(self) -> None:
        for cache_id in [c for c in self.ending if not self.leased(c)]:
            self.workers.jobs.pop(("free", cache_id))()
            del self.ending[cache_id]

    # ---- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def caches_keys_and_pages_agree(self) -> None:
        registry, pools = self.state.registry, self.state.pools
        assert [r.cache_id for r in registry.records()] == sorted(self.alive)
        for cache_id, alive in self.alive.items():
            record = registry.get(cache_id)
            assert record is not None
            assert {name for name, _ in registry.names_of(record)} == set(alive.keys)
        info = pools.info(Placement.DEVICE)
        assert info.free_nbytes == (PAGES - self.pages_out()) * PAGE
        assert info.allocations == len(self.alive) + len(self.ending)
        assert set(self.workers.jobs) == {("free", cache_id) for cache_id in self.ending}

    @invariant()
    def every_page_has_one_cache(self) -> None:
        starts = sorted(a for c in self.alive.values() for a in c.cache.tensor_addrs)
        assert len(set(starts)) == len(starts) and all(start % PAGE == 0 for start in starts)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=30)


@pytest.fixture
def made() -> Any:
    state = State(9, options(), {})
    state.pools.open()
    yield state, Allocator(state, Catalog(state))
    state.pools.close()
    state.slab.close_descriptor()


DESC = CacheDesc(TENSORS, [SLOTS, 600], DataType.DT_INT8)


def test_a_request_key_that_belongs_to_another_cache_by_now_is_not_released(made: Any) -> None:
    state, allocator = made
    key = CacheKey(9, 1)
    first = allocator.allocate(DESC, [key], is_blocks=False, call=KEPT)
    record = state.registry.get(first.cache_id)
    allocator.remove_key(key)
    second = allocator.allocate(DESC, [key], is_blocks=False, call=KEPT)
    allocator.pulled(record, key_name_of(key), 0, TENSORS)
    assert state.registry.find(key_name_of(key))[0].cache_id == second.cache_id


def test_a_key_that_is_bound_again_starts_with_nothing_pulled(made: Any) -> None:
    state, allocator = made
    key, name = CacheKey(9, 1), key_name_of(CacheKey(9, 1))
    for first in range(TENSORS):  # each cache has another tensor pulled
        cache = allocator.allocate(DESC, [key], is_blocks=False, call=KEPT)
        allocator.pulled(state.registry.get(cache.cache_id), name, first, first + 1)
        assert state.registry.find(name)[0].cache_id == cache.cache_id
        allocator.remove_key(key)


def test_m4_an_allocation_that_fails_halfway_leaves_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, allocator = made

    def no_word() -> Any:
        raise MemoryError("no memory for a chunk of words")

    with monkeypatch.context() as broken:
        broken.setattr(state, "new_word", no_word)
        with pytest.raises(MemoryError):
            allocator.allocate(DESC, [CacheKey(9, 1)], is_blocks=False, call=KEPT)
    assert state.pools.info(Placement.DEVICE).free_nbytes == PAGES * PAGE
    assert allocator.allocate(DESC, [CacheKey(9, 1)], is_blocks=False, call=KEPT).cache_id == 1


def test_the_most_tensors_that_can_be_asked_for_are_refused_at_once(made: Any) -> None:
    _, allocator = made
    with pytest.raises(OutOfMemoryError, match=str((2**32 - 1) * PAGE)):
        allocator.allocate(CacheDesc(2**32 - 1, [1], DataType.DT_INT8), (), is_blocks=False, call=KEPT)


@pytest.mark.rule("6.42", "6.45")
def test_a_blocks_cache_goes_at_once_whatever_key_finds_it(made: Any) -> None:
    state, allocator = made
    cache = allocator.allocate(DESC, [BlocksCacheKey(9, 3)], is_blocks=True, call=KEPT)
    with pytest.raises(ParamInvalidError, match="is a blocks cache; use deallocate_blocks_cache"):
        allocator.deallocate(cache, is_blocks=False, call=KEPT)
    allocator.deallocate(cache, is_blocks=True, call=KEPT)
    allocator.deallocate(cache, is_blocks=True, call=KEPT)
    assert state.pools.info(Placement.DEVICE).free_nbytes == PAGES * PAGE
    slots = allocator.allocate(DESC, (), is_blocks=False, call=KEPT)
    with pytest.raises(ParamInvalidError, match="is a cache; use deallocate_cache"):
        allocator.deallocate(slots, is_blocks=True, call=KEPT)


def test_a_handle_of_an_earlier_life_frees_nothing(made: Any) -> None:
    state, allocator = made
    cache = allocator.allocate(DESC, (), is_blocks=False, call=KEPT)
    allocator.deallocate(
        Cache(cache.cache_id, DESC, cache.tensor_addrs, life=object()), is_blocks=False, call=KEPT
    )
    assert state.registry.get(cache.cache_id) is not None
