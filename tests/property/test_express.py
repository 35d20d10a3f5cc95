"""Pulls along a known route against plain pulls: the same bytes and the same refusals, whatever happened before.

Two engines read one owner and go through the same; one of them has no short way.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, Cache, LLMDataDist, LLMException, LLMStatusCode, MemInfo, Memtype
from llm_datadist.transports.local_read import LocalRead, LocalRows
from llm_datadist.transports.nixl_again import NixlRows
from llm_datadist.transports.nixl_read import NixlRead
from llm_datadist.transports.tcp_channel import TcpRead
from llm_datadist.transports.tcp_units import TcpUnits
from tests.support.engines import Engines, unlink
from tests.support.fake_world import fake_world
from tests.support.memory import FILL
from tests.support.world import wait_until

MODELS = (0, 1)
LAYOUTS = [(3, 4, 64)] * 9 + [(1, 4, 64), (3, 2, 64), (3, 4, 96)]
BLOCKS = [0, 1, 2, 3] * 8 + [4, -1, 1 << 63, 1 << 64]
LINKED = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}
Registered: TypeAlias = tuple[Cache, NDArray[np.uint8]]


@dataclass
class Reader:
    """An engine that pulls, and its two places for caches."""

    engine: LLMDataDist
    caches: dict[int, Registered] = field(default_factory=dict)
    short: list[bool] = field(default_factory=list)

    def outcome(self, key: BlocksCacheKey, at: int, src: list[int], dst: list[int]) -> object:
        """What kind of exception, with its code; and what the destination holds then."""
        cache, memory = self.caches[at]
        memory[:] = FILL
        try:
            self.engine.cache_manager.pull_blocks(key, cache, src, dst)
        except LLMException as exc:
            return type(exc), exc.status_code, memory.tobytes()
        except (TypeError, ValueError) as exc:
            return type(exc), str(exc), memory.tobytes()
        return memory.tobytes()


class Walk(Engines):
    """Everything that is done is done to both readers."""

    def __init__(self, seed: int, backend: str) -> None:
        super().__init__("B", backend)
        self.sources: dict[int, Registered] = {}
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.owner = self.make(1)
        self.readers = [self.reader(2), self.reader(3)]
        self.link_all()
        self.register_there(0)
        self.register_here(0)

    def step(self) -> None:
        """Mostly pulls, a few along each route."""
        events: list[Callable[[int], None]] = [
            *[self.register_there, self.register_here] * 3, self.register_there_again, self.remap_there,
            self.unregister_there, self.unregister_here, self.remap_here,
        ]  # fmt: skip
        at, draw = self.random.choice(MODELS), self.random.random()
        if draw < 0.6:
            self.pull(at)
        elif draw < 0.93:
            self.random.choice(events)(at)
        elif draw < 0.935:
            self.unlink_all()
        elif draw < 0.99:
            self.link_all()
        else:
            self.restart_owner()

    def reader(self, cluster_id: int) -> Reader:
        reader = Reader(self.make(cluster_id))
        inside: Any = reader.engine._engine
        inside._state.find_sibling = lambda instance: None  # as if the owner were another process
        pull_again = inside.pull_again

        def observed(*arguments: Any) -> bool:
            done: bool = cluster_id == 2 and pull_again(*arguments)
            reader.short.append(done)
            return done

        inside.pull_again = observed
        return reader

    # ---- what happens ------------------------------------------------------------------------------

    def register_there(self, model: int) -> None:
        layout = self.random.choice(LAYOUTS)
        self.sources[model] = self.cache(self.owner, layout, self.rng.integers(0, 256, layout), model)

    def unregister_there(self, model: int) -> None:
        if model in self.sources:
            self.owner.cache_manager.unregister_cache(self.sources.pop(model)[0].cache_id)

    def register_there_again(self, model: int) -> None:
        if model in self.sources:
            cache, memory = self.sources[model]
            self.owner.cache_manager.unregister_cache(cache.cache_id)
            memory[:] = self.rng.integers(0, 256, memory.shape)
            self.sources[model] = self.register(self.owner, memory, model), memory

    def remap_there(self, model: int) -> None:
        if model in self.sources:
            remap(self.owner, self.sources[model][1])

    def register_here(self, at: int) -> None:
        self.unregister_here(at)
        layout = self.random.choice(LAYOUTS)
        for reader in self.readers:
            reader.caches[at] = self.cache(reader.engine, layout, FILL, None)

    def unregister_here(self, at: int) -> None:
        for reader in self.readers:
            if at in reader.caches:
                reader.engine.cache_manager.unregister_cache(reader.caches[at][0].cache_id)

    def remap_here(self, at: int) -> None:
        for reader in self.readers:
            if at in reader.caches:
                remap(reader.engine, reader.caches[at][1])

    def unlink_all(self) -> None:
        for reader in self.readers:
            unlink(reader.engine, 1)

    def link_all(self) -> None:
        for reader in self.readers:
            assert self.link(reader.engine, 1, self.owner) in LINKED

    def restart_owner(self) -> None:
        self.owner.finalize()
        for reader in self.readers:
            assert wait_until(lambda reader=reader: not reader.engine.links(), 10)
        self.owner = self.make(1)
        self.sources.clear()
        self.register_there(0)
        self.link_all()

    # ---- what is compared --------------------------------------------------------------------------

    def pull(self, model: int) -> None:
        at = self.random.choice(MODELS)
        if at not in self.readers[0].caches:
            return
        for _ in range(8):
            src, dst = self.random.choice(BLOCKS), self.random.choice(BLOCKS)
            with_short, plain = (r.outcome(BlocksCacheKey(1, model), at, [src], [dst]) for r in self.readers)
            assert with_short == plain

    def cache(
        self, engine: LLMDataDist, layout: tuple[int, int, int], content: Any, model: int | None
    ) -> Registered:
        memory = self.space(engine, layout)
        memory[:] = content
        return self.register(engine, memory, model), memory


def remap(engine: LLMDataDist, memory: NDArray[np.uint8]) -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, memory.ctypes.data, memory.nbytes)
    engine.cache_manager.remap_registered_memory(info)


SEEDS = [("local", 0), ("local", 1), ("local", 2), ("tcp", 3), ("tcp", 4), ("nixl", 5)]


@pytest.mark.parametrize(("backend", "seed"), SEEDS)
def test_pulls_along_a_route_equal_plain_pulls(
    backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(monkeypatch)
    with Walk(seed, backend) as walk:
        entered = _watch_reads(walk, monkeypatch)
        for _ in range(250):
            walk.step()
        assert sum(walk.readers[0].short) >= 100, "the short way was hardly ever taken"
        assert not any(walk.readers[1].short)
        assert {len(flights) for flights in entered} == {1}, "a read that nobody finds who must end it"
        assert all(flight["reads"] and flight["cache_ids"] for (flight,) in entered)


def _watch_reads(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """What of this thread is in flight at every read that it makes."""
    entered: list[list[dict[str, Any]]] = []
    me = threading.get_ident()

    def note() -> None:
        if threading.get_ident() != me:  # the control thread, which proves that it reaches a peer
            return
        flights = [
            f
            for r in walk.readers
            for f in r.engine._engine._state.flights.where(lambda f: f.thread == me)  # type: ignore[union-attr]
        ]
        entered.append([{"reads": f.reads, "cache_ids": f.cache_ids} for f in flights])

    def watch(kind: Any, name: str) -> None:
        method = getattr(kind, name)

        def observed(*arguments: Any, **named: Any) -> Any:
            note()
            return method(*arguments, **named)

        monkeypatch.setattr(kind, name, observed)

    for kind in (LocalRows, TcpUnits, NixlRows):
        watch(kind, "read")
    for kind in (LocalRead, TcpRead, NixlRead):
        watch(kind, "wait")
    return entered
