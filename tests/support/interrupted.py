"""Calls that are interrupted, and what is true after each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMStatusCode,
    NotLinkedError,
    Placement,
)
from llm_datadist._engine.flights import Flight
from llm_datadist._waiting import is_within
from tests.support import allocated
from tests.support.engines import Engines, Layers, unlink
from tests.support.memory import FILL
from tests.support.pair import COMBOS, SUCCESS, Combo
from tests.support.world import wait_until

KEY, MODEL = CacheKey(2, 5, 0), 9
DESC = CacheDesc(2, [2, 1000], DataType.DT_UINT8)
POOL_NBYTES = 1 << 20
END_S = 5.0
STRIDE = 11  # a prime: of what repeats every few steps each is hit in the end
INTERRUPTED = [combo for combo in COMBOS if str(combo) in ("A-local", "B-tcp", "B-shm")]
SOME = [pytest.param(STRIDE, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


class Two(Engines):
    """A reader (2) and an owner (1), linked, each with a cache of the other's form; the reader has a pool."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo.mode, combo.backend)
        self.owner = self.make(1)
        self.reader = self.make(2, MemPoolConfig=allocated.pool(POOL_NBYTES))
        self.manager = self.reader.cache_manager
        self.relink()
        _, self.theirs = self.blocks(self.owner, 7, model_id=0)
        self.cache, self.mine = self.blocks(self.reader, model_id=0)
        self.spare = self.space(self.reader, (4, 4, 64))
        self.made: list[Cache] = []
        self.threads = {t.name for t in threading.enumerate()}

    def relink(self) -> None:
        assert self.link(self.reader, 1, self.owner) in (SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)

    @property
    def state(self) -> Any:
        return self.reader._engine._state  # type: ignore[union-attr]

    def check(self, where: object) -> None:
        """What holds whatever was interrupted."""
        for engine in (self.reader, self.owner):
            state = engine._engine._state  # type: ignore[union-attr]
            assert wait_until(lambda: not state.flights.where(lambda f: True), END_S), where  # noqa: B023
            assert wait_until(lambda: not state.leases.all(), END_S), where  # noqa: B023
            assert not is_within() and state.lock.acquire(timeout=END_S), where
            state.lock.release()
            registry = state.registry
            assert set(registry._bound) == set(registry._words), where
            assert all(registry.find(name) for name in list(registry._bound)), where
            assert sorted(registry._finds) == sorted(word.value for word in registry._words.values()), where
        starts = [
            a for info in self.manager.caches() if info.allocated for a in self.addresses(info.cache_id)
        ]
        assert len(set(starts)) == len(starts), where
        assert self.threads <= {t.name for t in threading.enumerate()}, where

    def addresses(self, cache_id: int) -> list[int]:
        return self.state.registry.get(cache_id).addresses.tolist()  # type: ignore[no-any-return]

    def ids(self) -> list[int]:
        return [info.cache_id for info in self.manager.caches()]


class Call:
    """One public call and what is true after it."""

    def prepare(self, two: Two) -> None:
        """Before each try."""

    def make(self, two: Two) -> object:
        """The call."""
        raise NotImplementedError

    def interrupted(self, two: Two) -> None:
        """Nothing of it is left; the same call works."""
        self.done(two, self.make(two))

    def done(self, two: Two, result: Any) -> None:
        """It has ended undisturbed."""


class Allocate(Call):
    def make(self, two: Two) -> Cache:
        return two.manager.allocate_cache(DESC, [KEY])

    def interrupted(self, two: Two) -> None:
        assert two.manager.pool_info(Placement.DEVICE).free_nbytes == POOL_NBYTES
        assert two.ids() == [two.cache.cache_id]
        super().interrupted(two)

    def done(self, two: Two, result: Cache) -> None:
        two.manager.unregister_cache(result.cache_id)
        assert two.manager.pool_info(Placement.DEVICE).free_nbytes == POOL_NBYTES


class Deallocate(Call):
    def prepare(self, two: Two) -> None:
        self._cache = two.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, MODEL))

    def make(self, two: Two) -> None:
        two.manager.deallocate_blocks_cache(self._cache)

    def done(self, two: Two, result: None) -> None:
        assert two.manager.pool_info(Placement.DEVICE).free_nbytes == POOL_NBYTES
        assert two.ids() == [two.cache.cache_id]


class Register(Call):
    def make(self, two: Two) -> Cache:
        return two.register(two.reader, two.spare, MODEL)

    def interrupted(self, two: Two) -> None:
        assert two.ids() == [two.cache.cache_id]
        super().interrupted(two)

    def done(self, two: Two, result: Cache) -> None:
        two.manager.unregister_cache(result.cache_id)


class TakeOver(Register):
    """A key that another cache had finds that again."""

    def make(self, two: Two) -> Cache:
        return two.register(two.reader, two.spare, 0)

    def interrupted(self, two: Two) -> None:
        (info,) = two.manager.caches()
        assert info.keys == (BlocksCacheKey(2, 0),)
        super().interrupted(two)

    def done(self, two: Two, result: Cache) -> None:
        super().done(two, result)
        two.manager.unregister_cache(two.cache.cache_id)
        two.cache = two.register(two.reader, two.mine, 0)


class Unregister(Call):
    def prepare(self, two: Two) -> None:
        self._cache = two.register(two.reader, two.spare, MODEL)

    def make(self, two: Two) -> None:
        two.manager.unregister_cache(self._cache.cache_id)

    def done(self, two: Two, result: None) -> None:
        assert two.ids() == [two.cache.cache_id]


class RemoveKey(Call):
    def prepare(self, two: Two) -> None:
        cache = two.manager.allocate_cache(DESC, [KEY])
        two.manager.deallocate_cache(cache)

    def make(self, two: Two) -> None:
        two.manager.remove_cache_key(KEY)

    def done(self, two: Two, result: None) -> None:
        assert two.manager.pool_info(Placement.DEVICE).free_nbytes == POOL_NBYTES


class Link(Call):
    def prepare(self, two: Two) -> None:
        assert unlink(two.reader, 1) == SUCCESS

    def make(self, two: Two) -> object:
        return two.link(two.reader, 1, two.owner)

    def interrupted(self, two: Two) -> None:
        assert self.make(two) in (SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
        self.done(two, None)

    def done(self, two: Two, result: object) -> None:
        Pull().make(two)


class Unlink(Call):
    def prepare(self, two: Two) -> None:
        two.relink()

    def make(self, two: Two) -> object:
        return unlink(two.reader, 1)

    def interrupted(self, two: Two) -> None:
        assert wait_until(lambda: bool(two.owner.links()) == bool(two.reader.links()), END_S)
        if two.reader.links():
            try:
                Pull().make(two)
            except NotLinkedError:  # of two interrupts the second one struck the wait: it goes on
                assert wait_until(lambda: not two.reader.links(), END_S)
        assert self.make(two) == SUCCESS
        self.done(two, None)

    def done(self, two: Two, result: object) -> None:
        assert not two.reader.links()
        assert wait_until(lambda: not two.owner.links(), END_S)


class UnlinkBusy(Call):
    """A transfer goes on for longer than it waits: the link is as it was."""

    def make(self, two: Two) -> object:
        flight = Flight(two.state.links.get(1), ())
        with flight.during():
            two.state.flights._all.add(flight)
            return unlink(two.reader, 1, 20)

    def done(self, two: Two, result: object) -> None:
        assert result == LLMStatusCode.LLM_LINK_BUSY
        Pull().make(two)


class Pull(Call):
    def make(self, two: Two) -> None:
        two.manager.pull_blocks(BlocksCacheKey(1, 0), two.cache, [1, 3], [1, 3])

    def done(self, two: Two, result: None) -> None:
        assert (two.mine[:, [1, 3]] == 7).all() and (two.mine[:, [0, 2]] == FILL).all()


class PullOne(Call):
    def make(self, two: Two) -> None:
        two.manager.pull_blocks(BlocksCacheKey(1, 0), two.cache, [1], [1])

    def done(self, two: Two, result: None) -> None:
        assert (two.mine[:, 1] == 7).all()


class PullAsync(Pull):
    def make(self, two: Two) -> None:
        task = two.manager.pull_blocks_async(BlocksCacheKey(1, 0), two.cache, [1, 3], [1, 3])
        assert task.synchronize(5000) == SUCCESS


class Push(Call):
    def make(self, two: Two) -> None:
        two.manager.push_blocks(BlocksCacheKey(1, 0), two.cache, [1, 3], [1, 3])

    def done(self, two: Two, result: None) -> None:
        assert (two.theirs[:, [1, 3]] == FILL).all()
        two.theirs[:] = 7


class PushLayers(Call):
    def make(self, two: Two) -> None:
        task = two.push_layers(two.reader, two.cache, (1, 0, two.theirs), Layers())
        assert task.synchronize(5000) == SUCCESS

    def done(self, two: Two, result: None) -> None:
        two.theirs[:] = 7


class Copy(Call):
    def make(self, two: Two) -> None:
        two.manager.copy_blocks(two.cache, {0: [2]})


class Send(Call):
    """Each text at most once at the peer, and in any case if the call has succeeded."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def make(self, two: Two) -> bytes:
        text = str(next(self._numbers)).encode()
        two.reader.send_notify(1, "name", text)
        return text

    def done(self, two: Two, result: bytes) -> None:
        texts = [notify.message for notify in two.owner.get_notifies()]
        assert texts.count(result) == 1 and len(set(texts)) == len(texts)


class Take(Call):
    """What a peer has sent is taken once, whoever was interrupted."""

    def prepare(self, two: Two) -> None:
        two.owner.send_notify(2, "first", b"")
        two.owner.send_notify(2, "second", b"")

    def make(self, two: Two) -> list[str]:
        return [notify.name for notify in two.reader.get_notifies()]

    def done(self, two: Two, result: list[str]) -> None:
        assert result == ["first", "second"]


NEEDS_B: list[object] = [Push]


def strike_all(two: Two, call: Call, stride: int, strike: Callable[[int, Callable[[], None]], object]) -> int:
    """Interrupts it at one step after the other; the number of the first that it does not have.

    ``strike`` runs a call, interrupted at a step, and returns where that was; None: it has fewer.
    """
    call.prepare(two)
    call.done(two, call.make(two))  # what is loaded or found once
    for number in itertools.count(1, stride):
        call.prepare(two)
        results: list[object] = []
        where = strike(number, lambda: results.append(call.make(two)))  # noqa: B023
        if where is None:
            call.done(two, results[0])
            break
        two.check(where)
        call.interrupted(two)
    two.check("at the end")
    return number


def skip_in_a(two: Two, make: object) -> None:
    if two.mode == "A" and make in NEEDS_B:
        pytest.skip("pushes need mode B")
