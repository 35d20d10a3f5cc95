"""§6 remap_registered_memory: memory mapped anew is read anew, and a reader of the old one notices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode, MemInfo, Memtype
from llm_datadist._core.registry import KeyName
from llm_datadist._engine import executor
from llm_datadist._engine.state import peer_of
from tests.support import actors, allocated
from tests.support.engines import Engines
from tests.support.memory import FILL, PAGE, Mapping
from tests.support.pair import P_ID, SEED, Pair, Shape, by_id, of_model
from tests.support.short_pair import little_time
from tests.support.world import World, wait_until

INVALID = LLMStatusCode.LLM_PARAM_INVALID
DEVICE = Memtype.MEM_TYPE_DEVICE


def _map_anew(w: World, name: str, seed: int) -> None:
    """The same addresses, other pages; in a pool, whose pages stay, other bytes."""
    held = w.held[name]
    if isinstance(held.mapping, Mapping):
        address, nbytes = held.mapping.address, held.mapping.nbytes
        held.mapping.close()
        held.mapping = Mapping(nbytes, address)
    held.fill(seed)


def _remap(w: World, name: str) -> None:
    held = w.held[name]
    w.dist.cache_manager.remap_registered_memory(MemInfo(DEVICE, held.addresses[0], held.tensor_nbytes))


def _word(w: World, cache_id: int) -> int:
    return int(w.dist._engine._state.registry.get(cache_id).word.value)


def _words_become(w: World, count: int) -> bool:
    """Whether so many words hold in the end: one of each cache and of each bound key, none of leases."""
    return wait_until(lambda: len(w.dist._engine._state.slab._used) == count)


def _hears_of(w: World, cache_id: int, word: int) -> bool:
    """Whether our copy of P's table gets that generation without a pull."""
    table = peer_of(w.dist._engine._state.links.get(P_ID)).table
    name = KeyName("cache", cache_id, 0)
    return wait_until(lambda: table.find(name)[0].word.value == word)  # type: ignore[index]


@pytest.mark.rule("6.96")
def test_peers_read_the_new_memory_under_the_same_id_and_key(pair: Pair) -> None:
    pair.up()
    cache_id = pair.source()
    other = pair.source("other", seed=SEED + 1, model_id=1)
    pair.destination()
    pair.pull_blocks([1], [0]).ok()
    words = {pair.p.call(_word, 1)}
    for seed in (21, 22):
        pair.p.call(_map_anew, "src", seed)
        pair.p.call(_remap, "src")
        words.add(pair.p.call(_word, 1))
        if pair.combo.mode == "B":
            assert pair.d.call(_hears_of, 1, pair.p.call(_word, 1)), "the peer was not told"
        pair.sources["src"] = (Shape(), seed)
        pair.d.call(actors.refill, "dst", None)
        pair.pull_blocks([3], [2]).ok()
        pair.blocks_right([3], [2])
    assert len(words) == 3 and pair.p.call(_words_become, 4), "an old word still holds"
    assert [c[0] for c in pair.p.call(allocated.caches)] == [cache_id, other] == [1, 2]
    assert pair.p.call(allocated.bound) == [("model", 0), ("model", 1)]
    pair.pull_blocks([3], [2], of_model(1)).ok()
    pair.blocks_right([3], [2], "other")


@pytest.mark.rule("6.96")
def test_a_reader_of_the_old_generation_notices(pair: Pair) -> None:
    pair.up(timeout_ms=10_000)
    cache_id = pair.slots()
    pair.slot_destination()
    pair.d.call(allocated.close_gate)
    reading = pair.d.start(actors.pull_cache, by_id(cache_id, 1), "dst", 0)
    assert pair.d.call(allocated.gate_reached)
    pair.p.call(_map_anew, "src", 21)
    pair.p.call(_remap, "src")
    assert pair.p.call(allocated.caches)[0][5] == 0
    pair.d.call(allocated.open_gate)
    reading.result()  # it had not begun, and has asked the owner again
    pair.sources["src"] = (Shape(), 21)
    pair.right([(1024, 0, 1024)])


class Beside:
    """Two engines; the owner does something ``times`` times in the middle of the reader's pull.

    Before its first byte, or after its last byte and before the last look at what says that it was still there.
    """

    def __init__(self, engines: Engines, patch: pytest.MonkeyPatch) -> None:
        self.mode, self._engines = engines.mode, engines
        self.owner, self.reader = engines.make(1), engines.make(2)
        assert engines.link(self.reader, 1, self.owner) == LLMStatusCode.LLM_SUCCESS
        self.source, self.there = engines.blocks(self.owner, 5, 0)
        self.cache, self.here = engines.blocks(self.reader)
        self._patch = patch

    def pull(self, times: int, when: str, what: Callable[[], object]) -> None:
        if when == "after" and self._engines.backend == "tcp":
            pytest.skip("over tcp the owner looks, while it sends")
        left, move, check = iter(range(times)), executor._move, executor._check_word

        def moving(*how: Any) -> None:
            if next(left, None) is not None:
                what()
            move(*how)

        def checking(*how: Any, begun: bool) -> None:
            if begun and next(left, None) is not None:
                what()
            check(*how, begun=begun)

        with self._patch.context() as patch:
            if when == "before":
                patch.setattr(executor, "_move", moving)
            else:
                patch.setattr(executor, "_check_word", checking)
            self.reader.cache_manager.pull_blocks(dd.BlocksCacheKey(1, 0), self.cache, [1, 2], [2, 3])
        assert next(left, None) is None, "the pull has not come there so often"

    def remap(self) -> None:
        """With other bytes there."""
        self.there += 1
        whole = MemInfo(DEVICE, self.there.ctypes.data, self.there.nbytes)
        self.owner.cache_manager.remap_registered_memory(whole)

    def take_over(self) -> None:
        self._engines.register(self.owner, self._engines.space(self.owner, (4, 4, 64), 9), 0)


@pytest.fixture(params=[f"{mode}-{name}" for mode in "AB" for name in ("local", "shm", "tcp")])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    with Engines(*request.param.split("-")) as engines:
        yield Beside(engines, monkeypatch)


BEFORE_AND_AFTER = pytest.mark.parametrize("when", ["before", "after"])


@BEFORE_AND_AFTER
@pytest.mark.rule("6.96")
def test_a_pull_beside_remaps_reads_what_is_there_however_many_they_are(beside: Beside, when: str) -> None:
    """The cache is registered throughout, so no pull may say that it does not exist."""
    beside.pull(3, when, beside.remap)
    assert (beside.here[:, 2:] == 8).all() and (beside.here[:, :2] == FILL).all()
    assert wait_until(lambda: not beside.owner._engine._state.leases.all())  # type: ignore[union-attr]


@BEFORE_AND_AFTER
def test_a_pull_beside_a_key_that_is_taken_over_reads_what_had_it_or_has_it(
    beside: Beside, when: str
) -> None:
    beside.pull(1, when, beside.take_over)
    assert (beside.here[:, 2:] == (5 if beside.mode == "A" else 9)).all(), "one with a lease finishes"


@BEFORE_AND_AFTER
def test_a_pull_of_what_is_unregistered_meanwhile_says_that_it_is_gone(beside: Beside, when: str) -> None:
    with little_time(beside.owner), pytest.raises(dd.CacheNotExistError) as told:
        beside.pull(1, when, lambda: beside.owner.cache_manager.unregister_cache(beside.source.cache_id))
    assert when == "before" or "while it was being read" in str(told.value)


@pytest.mark.rule("5.14")
def test_a_pull_whose_bytes_are_of_a_cache_that_has_gone_says_so_whatever_has_its_key(beside: Beside) -> None:
    def register_anew() -> None:
        beside.owner.cache_manager.unregister_cache(beside.source.cache_id)
        beside.take_over()

    with little_time(beside.owner), pytest.raises(dd.CacheNotExistError, match="while it was being read"):
        beside.pull(1, "after", register_anew)


def test_an_allocated_cache_keeps_its_keys_and_pages(pair_a: Pair) -> None:
    pair_a.up(MemPoolConfig=allocated.pool(1 << 20))
    pair_a.sources["src"] = (Shape(), SEED)
    pair_a.p.call(allocated.slots, "src", keys=[(5, 0)], seed=SEED)
    pair_a.slot_destination()
    pair_a.p.call(_remap, "src")
    pair_a.p.call(allocated.deallocate, "src")
    pair_a.pull_cache(dd.CacheKey(1, 5), 0).ok()
    pair_a.right([(0, 0, 1024)])
    assert pair_a.p.call(allocated.all_free)


@pytest.mark.rule("6.91", "6.92", "6.95")
def test_what_is_refused_changes_nothing(pair: Pair) -> None:
    pair.combo.needs_own_mappings("a page of the cache is unmapped")
    pair.up()
    pair.p.call(_register_two)
    assert pair.p.call(_refusals) == ""
    pair.destination(shape=Shape(tensors=1, dim0=4, stride=PAGE))
    pair.pull_blocks([0], [0], of_model(0)).ok()


def _register_two(w: World) -> None:
    """A cache of four pages, the last of which goes away afterwards."""
    mapping = w.extras["mapping"] = Mapping(8 * PAGE)
    desc = allocated.desc_of(1, 4, PAGE)
    w.extras["cache"] = w.dist.cache_manager.register_blocks_cache(
        desc, [mapping.address + 4 * PAGE], dd.BlocksCacheKey(0, 0)
    )
    tail = copy.copy(mapping)
    tail.address, tail.nbytes = mapping.address + 7 * PAGE, PAGE
    tail.close()
    mapping.nbytes = 7 * PAGE


def _refusals(w: World) -> str:
    address = w.extras["mapping"].address
    word = w.dist._engine._state.registry.get(1).word
    for infos, parts in _bad_ranges(address):
        text = _refusal(lambda infos=infos: w.dist.cache_manager.remap_registered_memory(infos))  # type: ignore[misc]
        missing = [p for p in parts if p not in text]
        if missing or w.dist._engine._state.registry.get(1).word != word:
            return f"{infos}: {text!r} misses {missing}, or the generation has changed"
    return ""


def _bad_ranges(address: int) -> list[tuple[Any, list[str]]]:
    good = MemInfo(DEVICE, address, PAGE)
    return [
        (MemInfo(Memtype.MEM_TYPE_HOST, address, PAGE), ["mem_infos[0]", "MEM_TYPE_HOST", "device"]),
        ([good, MemInfo(DEVICE, 0, PAGE)], ["mem_infos[1]", "addr 0x0"]),
        ([good, MemInfo(DEVICE, address, 0)], ["mem_infos[1]", "size 0"]),
        ([good, MemInfo(DEVICE, address, -1)], ["size -1"]),
        (MemInfo(DEVICE, address, 8 * PAGE), ["mem_infos[0]", str(8 * PAGE), f"{address:#x}", "mapped"]),
        (MemInfo(DEVICE, 2**64 - PAGE, 2 * PAGE), ["mapped"]),
        (
            (MemInfo(DEVICE, address + 5 * PAGE, 1),),
            ["cache 1: tensor[0]", f"{address + 4 * PAGE:#x}", "mapped"],
        ),
    ]


def _refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except LLMException as exc:
        assert exc.status_code == INVALID, repr(exc)
        return str(exc)
    return "not refused"


@pytest.mark.parametrize("nbytes", [1, PAGE])
def test_memory_of_no_cache_is_only_checked(pair_a: Pair, nbytes: int) -> None:
    pair_a.up()
    pair_a.p.call(_remap_foreign, nbytes)


def _remap_foreign(w: World, nbytes: int) -> None:
    mapping = w.extras["mapping"] = Mapping(PAGE)
    w.dist.cache_manager.remap_registered_memory([MemInfo(DEVICE, mapping.address, nbytes)])
