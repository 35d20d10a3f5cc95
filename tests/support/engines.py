"""Several engines in the test's own process, for what a test must hold back or look into on either side."""

from __future__ import annotations

import contextlib
import math
import threading
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.support import actors
from tests.support.arena import Arena, arena_of
from tests.support.memory import FILL

E = TypeVar("E", bound="Engines")


class Engines:
    """Makes engines of one mode and transport; finalizes them at the end, the last one first."""

    def __init__(self, mode: str, backend: str, timeout_ms: int = 2000) -> None:
        self.mode, self.backend = mode, backend
        self._timeout_ms = timeout_ms
        self._stack = contextlib.ExitStack()
        self._held: list[NDArray[np.uint8]] = []
        self._arenas: dict[int, Arena] = {}

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def make(self, cluster_id: int, **more: str) -> LLMDataDist:
        engine = LLMDataDist(LLMRole.MIX, cluster_id)
        more["AllowMultipleInstances"] = "1"
        engine.init(actors.options(self.mode, self.backend, "127.0.0.1:0", self._timeout_ms, **more))
        self._stack.callback(engine.finalize)
        arena = arena_of(engine)
        if arena is not None:
            self._arenas[cluster_id] = arena
        return engine

    def space(self, engine: LLMDataDist, shape: tuple[int, ...], value: int = FILL) -> NDArray[np.uint8]:
        """Memory of a test, where the transport reaches it. One of a pool goes with the engine."""
        arena = self._arenas.get(engine.cluster_id)
        if arena is None:
            return np.full(shape, value, np.uint8)
        nbytes = math.prod(shape)
        memory = arena.take(nbytes).view(0, nbytes).reshape(shape)
        memory[:] = value
        return memory

    def link(self, engine: LLMDataDist, cluster_id: int, to: LLMDataDist) -> LLMStatusCode:
        return engine.link_clusters([actors.cluster(cluster_id, to.listen_address)], 3000)[0]

    def blocks(
        self, engine: LLMDataDist, value: int = FILL, model_id: int | None = None
    ) -> tuple[Cache, NDArray[np.uint8]]:
        """A blocks cache of two layers: 4 tensors of 4 blocks of 64 bytes, each ``value``; and its memory."""
        memory = self.space(engine, (4, 4, 64), value)
        return self.register(engine, memory, model_id), memory

    def register(self, engine: LLMDataDist, memory: NDArray[np.uint8], model_id: int | None = None) -> Cache:
        """A blocks cache in memory of the form (tensors, blocks, bytes), which may be a view."""
        self._held.append(memory)
        key = None if model_id is None else BlocksCacheKey(0, model_id)
        desc = CacheDesc(len(memory), list(memory.shape[1:]), DataType.DT_UINT8)
        return engine.cache_manager.register_blocks_cache(desc, [t.ctypes.data for t in memory], key)

    def push_layers(
        self,
        engine: LLMDataDist,
        source: Cache,
        to: tuple[int, int, NDArray[np.uint8]],
        synchronizer: LayerSynchronizer,
        blocks: tuple[list[int], list[int]] = ([1], [3]),
    ) -> CacheTask:
        """A layer-wise task of all layers ``to`` (cluster, model, memory there), said for either mode."""
        cluster_id, model_id, memory = to
        layers = range(len(memory) // 2)
        config: Any
        if self.mode == "A":
            config = TransferConfig(cluster_id, [t.ctypes.data for t in memory], layers)
        else:
            config = TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id, model_id), layers, layers)
        return engine.cache_manager.transfer_cache_async(
            source, synchronizer, [config], *blocks, memory.shape[2]
        )


class Layers(LayerSynchronizer):
    """Computes the first layer at once, the others when ``go_on`` is set (``hold``), or at once too."""

    def __init__(self, *, hold: bool = False) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        if not hold:
            self.go_on.set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if layer_index:
            self.reached.set()
            self.go_on.wait(20)
        return True


def unlink(
    engine: LLMDataDist, cluster_id: int, timeout: int = 3000, *, force: bool = False
) -> LLMStatusCode:
    return engine.unlink_clusters([actors.cluster(cluster_id)], timeout, force)[0]
