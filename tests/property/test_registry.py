"""The registry against a dict model, and who owns raw addresses against a byte-by-byte search."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, KeyName, Record, Registry, request_name
from llm_datadist.caches import CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import ParamInvalidError

pytestmark = pytest.mark.rule("6.19", "6.20", "6.21", "6.22", "6.23")

NONE = 2**64 - 1
WORD = GenerationWord(8, 1)


def add(
    registry: Registry,
    layout: Layout,
    addresses: list[int],
    names: tuple[tuple[KeyName, int], ...] = (),
    *,
    is_blocks: bool = False,
    accessible: bool = True,
) -> tuple[Record, Record | None]:
    desc = CacheDesc(layout.num_tensors, [layout.dim0, layout.stride_nbytes], DataType.DT_INT8)
    bases = np.array(addresses, dtype=np.uint64)
    return registry.add(
        desc, layout, bases, names, is_blocks=is_blocks, remote_accessible=accessible, word=WORD
    )


ids = st.sampled_from([1, 2, 3, 2**63, NONE])
slot_keys = st.builds(
    CacheKey, st.integers(1, 2), ids, st.integers(0, 1), st.sampled_from([NONE, NONE, 1, 2])
)


class RegistryMachine(RuleBasedStateMachine):
    """Model: cache id -> is_blocks, and key name -> (cache id, batch), as the contract tells them."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.made = 100  # the values of the words; WORD has a small one
        self.registry = Registry(self.new_word, self.clear_word)
        self.caches: dict[int, tuple[bool, Record]] = {}
        self.bound: dict[tuple[str, int, int], tuple[int, int]] = {}
        self.taken = 0

    @rule(keys=st.lists(slot_keys, max_size=4), dim0=st.integers(1, 4))
    def register_cache(self, keys: list[CacheKey], dim0: int) -> None:
        wanted: dict[tuple[str, int, int], int] = {}
        bad = len(keys) > dim0
        for batch, key in enumerate(keys):
            if key.req_id == NONE and key.prefix_id == NONE:
                continue
            kind = "prefix" if key.prefix_id != NONE else "req"
            name = (kind, key.prefix_id if kind == "prefix" else key.req_id, key.model_id)
            both = key.req_id != NONE and key.prefix_id != NONE
            bad = bad or both or name in wanted or name in self.bound
            wanted[name] = batch
        layout = Layout(1, dim0, 4)
        if bad:
            with pytest.raises(ParamInvalidError):
                self.registry.check_keys(keys, layout)
            return
        record, displaced = add(self.registry, layout, [64], self.registry.check_keys(keys, layout))
        assert displaced is None
        self.enter(record, False)
        self.bound.update({name: (record.cache_id, batch) for name, batch in wanted.items()})

    @rule(model=st.one_of(st.none(), st.integers(0, 2)))
    def register_blocks_cache(self, model: int | None) -> None:
        keys = () if model is None else (BlocksCacheKey(9, model),)
        layout = Layout(1, 2, 4)
        record, displaced = add(
            self.registry, layout, [64], self.registry.check_keys(keys, layout), is_blocks=True
        )
        self.enter(record, True)
        if model is not None:
            before = self.bound.get(("blocks", 0, model))
            assert (displaced and displaced.cache_id) == (before and before[0])
            self.bound["blocks", 0, model] = (record.cache_id, 0)

    def enter(self, record: Record, is_blocks: bool) -> None:
        self.taken += 1
        assert record.cache_id == self.taken
        self.caches[record.cache_id] = (is_blocks, record)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        cache_id = data.draw(st.integers(0, self.taken + 1))
        removed = self.registry.remove(cache_id)
        assert (removed is None) == (cache_id not in self.caches)
        self.caches.pop(cache_id, None)
        self.bound = {name: at for name, at in self.bound.items() if at[0] != cache_id}

    def new_word(self) -> GenerationWord:
        self.made += 1
        self.live.add(self.made)
        return GenerationWord(8 * self.made, self.made)

    def clear_word(self, word: GenerationWord) -> None:
        self.live.remove(word.value)

    @rule(kind=st.sampled_from(["req", "prefix", "blocks"]), id_=st.integers(0, 3), model=st.integers(0, 2))
    def remove_key(self, kind: str, id_: int, model: int) -> None:
        was = self.bound.pop((kind, id_, model), None)
        record = self.registry.unbind(KeyName(kind, id_, model))
        assert (record and record.cache_id) == (was and was[0])

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """What remap_registered_memory does: readers of the old words notice."""
        cache_id = data.draw(st.sampled_from(sorted(self.caches)))
        is_blocks, record = self.caches[cache_id]
        old = {word.value for _, _, word in self.registry.bindings_of(record)}
        fresh = dataclasses.replace(record)
        self.registry.replace(fresh)
        self.caches[cache_id] = (is_blocks, fresh)
        assert not old & self.live

    @invariant()
    def a_word_is_current_while_its_key_is_bound_and_no_longer(self) -> None:
        current = set()
        for _, record in self.caches.values():
            own = {word.value for _, _, word in self.registry.bindings_of(record)}
            assert {v for v in range(101, self.made + 1) if self.registry.is_current(record, v)} == own
            current |= own
        assert current == self.live and len(current) == len(self.bound)

    @invariant()
    def same_as_the_model(self) -> None:
        assert [r.cache_id for r in self.registry.records()] == sorted(self.caches)
        for kind, keys in (("req", ids), ("prefix", ids), ("blocks", st.just(0))):
            for id_ in [1, 2, 3, 2**63] if keys is ids else [0]:
                for model in (0, 1, 2):
                    found = self.registry.find(KeyName(kind, id_, model))
                    assert (found and (found[0].cache_id, found[1])) == self.bound.get((kind, id_, model))
        for cache_id in range(self.taken + 2):
            found = self.registry.find(KeyName("cache", cache_id, 0))
            wanted = self.caches.get(cache_id)
            assert (found and found[0]) is (wanted and wanted[1]) is self.registry.get(cache_id)
            assert found is None or found[1] == 0

    @invariant()
    def names_are_those_that_find_it_now(self) -> None:
        for cache_id, (_, record) in self.caches.items():
            names = dict(self.registry.names_of(record))
            wanted = {name: batch for name, (owner, batch) in self.bound.items() if owner == cache_id}
            assert names == wanted


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_name_of_a_request() -> None:
    assert request_name(BlocksCacheKey(5, 3)) == KeyName("blocks", 0, 3)
    assert request_name(CacheKeyByIdAndIndex(5, -1, 2)) == KeyName("cache", -1, 0)
    assert request_name(CacheKey(5, 2**63, 1)) == KeyName("req", 2**63, 1)
    assert request_name(CacheKey(5, NONE, 1, 7)) == KeyName("prefix", 7, 1)
    for ids_ in ((NONE, 0, NONE), (1, 0, 2)):
        with pytest.raises(ParamInvalidError, match="exactly one"):
            request_name(CacheKey(5, *ids_))


# ---- raw addresses (row Z4) ----------------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Registry, list[Record]]:
    """Up to five small caches in [100, 160), which may overlap and touch."""
    registry, records = Registry(), []
    for _ in range(draw(st.integers(0, 5))):
        layout = Layout(draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 8)))
        at = [draw(st.integers(100, 160)) for _ in range(layout.num_tensors)]
        records.append(add(registry, layout, at, accessible=draw(st.sampled_from([True, True, False])))[0])
    gone = draw(st.sampled_from([None, *records]))
    if gone is not None and draw(st.booleans()):
        registry.remove(gone.cache_id)
        records.remove(gone)
    return registry, records


def tensors_of(record: Record) -> list[range]:
    return [range(base, base + record.layout.tensor_nbytes) for base in record.addresses.tolist()]


@given(
    spaces(),
    st.lists(st.integers(96, 170), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3),
)
@settings(max_examples=250)
def test_owners_of(
    space: tuple[Registry, list[Record]], bases: list[int], units: list[tuple[int, int]]
) -> None:
    registry, records = space
    opened = [r for r in records if r.remote_accessible]
    written = [range(b + o, b + o + n) for b in bases for o, n in units]
    hulls = [range(b + min(o for o, _ in units), b + max(o + n for o, n in units)) for b in bases]
    allowed = all(any(set(w) <= set(t) for r in opened for t in tensors_of(r)) for w in written)
    columns = [np.array(c, dtype=np.uint64) for c in (bases, *zip(*units, strict=True))]
    if not allowed:
        with pytest.raises(ParamInvalidError, match="remote_accessible=True"):
            registry.open_memory().owners_of(*columns)
        return
    owners = {r.cache_id for r in registry.open_memory().owners_of(*columns)}
    assert owners >= meeting(opened, written)
    assert owners <= meeting(opened, hulls)


def meeting(records: list[Record], ranges: list[range]) -> set[int]:
    """Caches of which a byte lies in one of the ranges."""
    named = {b for r in ranges for b in r}
    return {r.cache_id for r in records if any(named & set(t) for t in tensors_of(r))}


def test_one_byte_past_the_end_and_the_first_bad_range_in_the_text() -> None:
    registry = Registry()
    record, _ = add(registry, Layout(1, 4, 8), [0x1000])
    owned = [np.array(c, dtype=np.uint64) for c in ([0x1000], [0, 24], [8, 8])]
    assert registry.open_memory().owners_of(*owned) == [record]
    owned[2] = np.array([8, 9], dtype=np.uint64)
    with pytest.raises(ParamInvalidError, match="0x1018, 0x1021"):
        registry.open_memory().owners_of(*owned)


def test_a_small_tensor_within_a_large_one_hides_nothing_of_it() -> None:
    registry = Registry()
    large, _ = add(registry, Layout(1, 1, 64), [0x1000])
    small, _ = add(registry, Layout(1, 1, 8), [0x1010])
    columns = [np.array([n], dtype=np.uint64) for n in (0x1000, 0x14, 12)]
    assert registry.open_memory().owners_of(*columns) == [large, small]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.data())
@settings(max_examples=80)
def test_touches(starts: list[int], data: st.DataObject) -> None:
    ends = [s + data.draw(st.integers(1, 6)) for s in starts]
    record, _ = add(Registry(), Layout(2, 2, 3), [data.draw(st.integers(0, 40)) for _ in range(2)])
    named = {b for s, e in zip(starts, ends, strict=True) for b in range(s, e)}
    wanted = any(named & set(t) for t in tensors_of(record))
    assert record.touches(*(np.array(c, dtype=np.uint64) for c in (starts, ends))) == wanted
