"""P and D: two real processes, P (id 1) listens and owns the source, D (id 2) dials it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from tests.support import actors
from tests.support.peers import Outcome, Peer, Running
from tests.support.pool import Spawner
from tests.support.sockets import unread
from tests.support.world import wait_until

P_ID = 1
D_ID = 2
SUCCESS = LLMStatusCode.LLM_SUCCESS
AT_ONCE = 0.5
SEED = 11


@dataclass(frozen=True)
class Combo:
    """One way to run a test: mode A or B, transport by name."""

    mode: str
    backend: str

    def __str__(self) -> str:
        return f"{self.mode}-{self.backend}"

    def needs_own_mappings(self, why: str) -> None:
        """Skips a test that does to source memory what its engine's pool, where ``shm`` reads, does not allow."""
        if self.backend == "shm":
            pytest.skip(f"pool memory belongs to the engine: {why}")


COMBOS = [Combo(mode, backend) for mode in "AB" for backend in ("local", "tcp", "shm")]
MODE_B = [combo for combo in COMBOS if combo.mode == "B"]
MODE_A = [combo for combo in COMBOS if combo.mode == "A"]


@dataclass
class Shape:
    """What a source or a destination looks like."""

    tensors: int = 2
    dim0: int = 8
    stride: int = 1024
    skew: int = 0

    @property
    def tensor_nbytes(self) -> int:
        return self.dim0 * self.stride

    def memory(self) -> dict[str, int]:
        return {"tensors": self.tensors, "dim0": self.dim0, "stride": self.stride, "skew": self.skew}


@dataclass
class Pair:
    """Both processes and what was registered; helpers so that a test says only what it is about."""

    p: Peer
    d: Peer
    combo: Combo
    address: Any = None
    sources: dict[str, tuple[Shape, int]] = field(default_factory=dict)

    def up(
        self, timeout_ms: int | None = None, d_listens: bool = False, link: bool = True, **more: str
    ) -> Pair:
        mode, backend = self.combo.mode, self.combo.backend
        values = actors.options(mode, backend, "127.0.0.1:0", timeout_ms, **more)
        self.address = self.p.call(actors.up, P_ID, values)
        listen = "127.0.0.1:0" if d_listens else None
        self.d.call(actors.up, D_ID, actors.options(mode, backend, listen, timeout_ms, **more))
        if link:
            self.link()
        return self

    def link(self, timeout: int | None = None) -> None:
        """Over NIXL both sides make an agent first: where others keep the machine busy that takes seconds."""
        timeout = timeout or (20_000 if self.combo.backend == "nixl" else 3000)
        got = self.d.call(actors.link, [(P_ID, self.address)], timeout)
        assert got == (SUCCESS, [SUCCESS]), got

    # -- sources at P, destinations at D (the other way round for pushes from D) ----------------------

    def source(self, name: str = "src", shape: Shape | None = None, seed: int = SEED, **how: Any) -> int:
        return self._register(self.p, "blocks", name, shape or Shape(), seed, how)

    def slots(self, name: str = "src", shape: Shape | None = None, seed: int = SEED, **how: Any) -> int:
        return self._register(self.p, "cache", name, shape or Shape(), seed, how)

    def destination(self, name: str = "dst", shape: Shape | None = None, **how: Any) -> int:
        return self._register(self.d, "blocks", name, shape or Shape(), None, how)

    def slot_destination(self, name: str = "dst", shape: Shape | None = None, **how: Any) -> int:
        return self._register(self.d, "cache", name, shape or Shape(), None, how)

    def _register(self, peer: Peer, kind: str, name: str, shape: Shape, seed: int | None, how: Any) -> int:
        if seed is not None:
            self.sources[name] = (shape, seed)
        func = actors.blocks_cache if kind == "blocks" else actors.slot_cache
        if kind == "blocks" and seed is not None:
            how = {"model_id": 0, **how}
        return int(peer.call(func, name, seed=seed, **shape.memory(), **how))

    # -- calls in D -----------------------------------------------------------------------------------

    def pull_blocks(self, src: Any, dst: Any, key: Any = None, name: str = "dst", **more: Any) -> Outcome:
        key = BlocksCacheKey(P_ID, 0) if key is None else key
        return self.d.attempt(actors.pull_blocks, key, name, src, dst, **more)

    def pull_cache(self, key: Any, *args: Any, name: str = "dst", **more: Any) -> Outcome:
        return self.d.attempt(actors.pull_cache, key, name, *args, **more)

    def asking(self, func: Any, *args: Any, **more: Any) -> Running:
        """A call in D that P, which is stopped, has to answer: the question has arrived there when this returns."""
        before = unread(self.address[1])
        running = self.d.start(func, *args, **more)
        assert wait_until(lambda: unread(self.address[1]) > before), "P is not asked"
        return running

    # -- looking --------------------------------------------------------------------------------------

    def unchanged(self, name: str = "dst", peer: Peer | None = None) -> None:
        text = (peer or self.d).call(actors.unchanged, name)
        assert not text, text

    def blocks_right(
        self,
        src: Any,
        dst: Any,
        source: str = "src",
        name: str = "dst",
        peer: Peer | None = None,
        **more: Any,
    ) -> None:
        """The destination has these blocks of the source, and 0xA5 everywhere else."""
        shape = self.sources[source][0]
        nbytes = shape.stride
        pieces = [(np.asarray(src, np.int64) * nbytes, np.asarray(dst, np.int64) * nbytes, nbytes)]
        self.right(pieces, source, name, peer, **more)

    def right(
        self, pieces: Any, source: str = "src", name: str = "dst", peer: Peer | None = None, **more: Any
    ) -> None:
        shape, seed = self.sources[source]
        text = (peer or self.d).call(
            actors.compare, name, seed=seed, src_tensor_nbytes=shape.tensor_nbytes, pieces=pieces, **more
        )
        assert not text, text


def by_id(cache_id: int, batch_index: int = 0, cluster_id: int = P_ID) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(cluster_id, cache_id, batch_index)


def by_request(req_id: int, model_id: int = 0, cluster_id: int = P_ID) -> CacheKey:
    return CacheKey(cluster_id, req_id, model_id)


def of_model(model_id: int, cluster_id: int = P_ID) -> BlocksCacheKey:
    return BlocksCacheKey(cluster_id, model_id)


def make_pair(spawn: Spawner, combo: Combo) -> Pair:
    return Pair(spawn(), spawn(), combo)
