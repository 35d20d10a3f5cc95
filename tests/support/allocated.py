"""What peers are told to do with allocated caches: functions run in a peer process, the world first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llm_datadist as dd
from llm_datadist._core import planning
from tests.support.memory import bytes_at
from tests.support.world import Held, World, wait_until

NONE = 2**64 - 1


def pool(nbytes: int, page_shift: int = 16) -> str:
    """The text of a pool option."""
    return f'{{"memory_size": {nbytes}, "page_shift": {page_shift}}}'


@dataclass
class PoolView:
    """Memory of a pool in the place of a mapping of the test."""

    address: int
    nbytes: int

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return bytes_at(self.address + offset, nbytes)

    def close(self) -> None:
        """It is the engine's."""


def hold(w: World, name: str, cache: Any, seed: int | None) -> int:
    """Remembers an allocated cache under a name and fills it as ``actors.make`` does; its id."""
    addresses, desc = cache.tensor_addrs, cache.cache_desc
    base = min(addresses)
    view = PoolView(base, max(addresses) + desc.size - base)
    held = Held(view, desc.num_tensors, desc.size, [a - base for a in addresses], cache, desc)  # type: ignore[arg-type]
    assert sorted(addresses) == addresses, "a fragmented pool: the span would cover other caches"
    w.held[name] = held
    if seed is not None or name.startswith("dst"):
        held.fill(seed)
    return int(cache.cache_id)


def desc_of(tensors: int, dim0: int, stride: int, placement: str = "DEVICE") -> Any:
    return dd.CacheDesc(tensors, [dim0, stride], dd.DataType.DT_UINT8, dd.Placement[placement])


def slots(
    w: World, name: str, *, keys: Sequence[tuple[int, int]] = (), prefixes: Sequence[int] = (),
    tensors: int = 2, dim0: int = 8, stride: int = 1024, seed: int | None = None, placement: str = "DEVICE",
) -> int:  # fmt: skip
    """Allocates a contiguous cache with (req_id, model_id) keys, then prefix keys; its id."""
    cache_keys = [dd.CacheKey(0, req, model) for req, model in keys]
    cache_keys += [dd.CacheKey(0, NONE, 0, prefix) for prefix in prefixes]
    desc = desc_of(tensors, dim0, stride, placement)
    return hold(w, name, w.dist.cache_manager.allocate_cache(desc, cache_keys), seed)


def blocks(
    w: World, name: str, *, model_id: int | None = None,
    tensors: int = 2, dim0: int = 8, stride: int = 1024, seed: int | None = None, placement: str = "DEVICE",
) -> int:  # fmt: skip
    """Allocates a blocks cache; its id."""
    key = None if model_id is None else dd.BlocksCacheKey(0, model_id)
    desc = desc_of(tensors, dim0, stride, placement)
    return hold(w, name, w.dist.cache_manager.allocate_blocks_cache(desc, key), seed)


def addresses(w: World, name: str) -> list[int]:
    return list(w.held[name].cache.tensor_addrs)


def deallocate(w: World, name: str) -> None:
    manager, cache = w.dist.cache_manager, w.held[name].cache
    (manager.deallocate_blocks_cache if cache.is_blocks_cache else manager.deallocate_cache)(cache)


def remove_key(w: World, key: Any) -> None:
    w.dist.cache_manager.remove_cache_key(key)


def caches(w: World) -> list[tuple[int, str, tuple[Any, ...], bool, bool, int]]:
    """(id, kind, keys, remote_accessible, allocated, leases) of each cache."""
    infos = w.dist.cache_manager.caches()
    return [(i.cache_id, i.kind, i.keys, i.remote_accessible, i.allocated, i.leases) for i in infos]


def bound(w: World) -> list[tuple[str, int]]:
    """The keys that find something now, as ("req" | "prefix" | "model", id)."""
    found: list[tuple[str, int]] = []
    for info in w.dist.cache_manager.caches():
        for key in info.keys:
            if isinstance(key, dd.BlocksCacheKey):
                found.append(("model", key.model_id))
            else:
                found.append(("prefix", key.prefix_id) if key.prefix_id != NONE else ("req", key.req_id))
    return sorted(found)


def bound_becomes(w: World, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same once the owner has heard of the last release; what it is when that does not come."""
    wait_until(lambda: bound(w) == sorted(wanted))
    return bound(w)


def free_nbytes(w: World, placement: str = "DEVICE") -> int:
    return int(w.dist.cache_manager.pool_info(dd.Placement[placement]).free_nbytes)


def all_free(w: World, placement: str = "DEVICE") -> bool:
    """Whether the pool becomes free, all of it and in one piece."""

    def free() -> bool:
        info = w.dist.cache_manager.pool_info(dd.Placement[placement])
        return bool(
            info.free_nbytes == info.total_nbytes == info.largest_free_nbytes and info.allocations == 0
        )

    return wait_until(free)


def numbered(w: World, req_id: int) -> None:
    """Allocates a cache whose every byte is its request's number, and deallocates it: the key alone holds it."""
    manager = w.dist.cache_manager
    cache = manager.allocate_cache(desc_of(2, 2, 5000), [dd.CacheKey(0, NONE), dd.CacheKey(0, req_id)])
    for address in cache.tensor_addrs:
        PoolView(address, 10_000).view(0, 10_000)[:] = req_id % 256
    manager.deallocate_cache(cache)


def pull_numbered(w: World, cluster_id: int, req_id: int) -> bool:
    """Pulls it into a cache of our own pool; whether every byte is right."""
    manager = w.dist.cache_manager
    cache = manager.allocate_cache(desc_of(2, 1, 5000))
    views = [PoolView(address, 5000).view(0, 5000) for address in cache.tensor_addrs]
    for view in views:
        view[:] = 255
    manager.pull_cache(dd.CacheKey(cluster_id, req_id), cache)
    right = all(bool((view == req_id).all()) for view in views)
    manager.deallocate_cache(cache)
    return right


class _Gate:
    """Stops pulls of slots after the lease was granted and before the first byte."""

    def __init__(self) -> None:
        self._plan = planning.plan_slot
        self._open = threading.Event()
        self.reached = threading.Event()
        planning.plan_slot = self

    def __call__(self, *arguments: Any) -> Any:
        self.reached.set()
        self._open.wait(30)
        return self._plan(*arguments)

    def close(self) -> None:
        planning.plan_slot = self._plan
        self._open.set()


def close_gate(w: World) -> None:
    """From now on pulls of slots stop with a lease in hand."""
    w.extras["gate"] = _Gate()


def gate_reached(w: World) -> bool:
    return bool(w.extras["gate"].reached.wait(10))


def open_gate(w: World) -> None:
    w.extras.pop("gate").close()
