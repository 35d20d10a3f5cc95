"""Memory of allocated caches: which pages of which pool a cache has. Guarded by the engine's lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llm_datadist._core.layout import Layout
from llm_datadist._core.pool import PagePool
from llm_datadist._core.pool_config import PoolConfig
from llm_datadist._core.segments import U64
from llm_datadist._shortages import hint_of
from llm_datadist.devices.pool_memory import PoolMemory
from llm_datadist.devices.shared_memory import NotSharable, SharedArea
from llm_datadist.enums import Placement
from llm_datadist.infos import PoolInfo
from llm_datadist.status import OutOfMemoryError, ParamInvalidError

_PROPERTY = {Placement.DEVICE: "mem_pool_cfg", Placement.HOST: "host_mem_pool_cfg"}


@dataclass(slots=True, eq=False)
class _Pool:
    memory: PoolMemory
    pages: PagePool
    page_nbytes: int
    caches: int = 0


@dataclass(slots=True, eq=False)
class _Allocation:
    """Pages of one cache. ``unowned``: deallocated by its owner, alive for the keys that find it."""

    pool: _Pool
    starts: Sequence[int]
    sizes: Sequence[int]
    unowned: bool = False


class Pools:
    """The pools of one engine, by placement."""

    def __init__(self, configs: Mapping[Placement, PoolConfig]) -> None:
        self._configs = configs
        self._pools: dict[Placement, _Pool] = {}
        self._allocations: dict[int, _Allocation] = {}

    def open(self) -> None:
        """Maps the memory.

        Raises:
            OutOfMemoryError: It cannot be had.
        """
        for placement, config in self._configs.items():
            page_nbytes = 1 << config.page_shift
            pages = config.memory_nbytes >> config.page_shift
            try:
                memory = PoolMemory(pages * page_nbytes, page_nbytes)
            except (MemoryError, OSError) as exc:
                self.close()
                advice = (isinstance(exc, OSError) and hint_of(exc.errno)) or "ask for less"
                raise OutOfMemoryError(
                    f"the pool of {_PROPERTY[placement]} cannot be had: {exc}; {advice}"
                ) from exc
            self._pools[placement] = _Pool(memory, PagePool(pages), page_nbytes)

    @property
    def areas(self) -> tuple[SharedArea, ...]:
        """What peers on this host may map."""
        unshared = self.unshared
        return tuple(pool.memory.area for at, pool in self._pools.items() if _PROPERTY[at] not in unshared)

    @property
    def unshared(self) -> dict[str, NotSharable]:
        """The pools that no peer may map, by the property that asks for each, and why."""
        found = {}
        for placement, pool in self._pools.items():
            try:
                _ = pool.memory.area
            except NotSharable as why:
                found[_PROPERTY[placement]] = why
        return found

    @property
    def bounds(self) -> dict[Placement, tuple[int, int]]:
        """(address, nbytes) of each pool."""
        return {
            placement: (pool.memory.address, pool.memory.nbytes) for placement, pool in self._pools.items()
        }

    def close(self, *, unmap: bool = True) -> None:
        """Gives everything back. ``unmap=False``: something may still write there, so the address stays taken."""
        for pool in self._pools.values():
            if unmap:
                pool.memory.close()
            else:
                pool.memory.close_descriptor()
        self._pools.clear()

    def close_after_fork(self) -> None:
        """In a forked child: lets go of the parent's memory and descriptors."""
        for pool in self._pools.values():
            pool.memory.leave_to_parent()

    def find(self, placement: Placement) -> _Pool:
        """The pool of a placement.

        Raises:
            ParamInvalidError: None is configured.
        """
        pool = self._pools.get(placement)
        if pool is None:
            raise ParamInvalidError(
                f"there is no pool for placement {placement.name}; set LLMConfig.{_PROPERTY[placement]} before init"
            )
        return pool

    def take(self, placement: Placement, layout: Layout) -> tuple[U64, _Allocation]:
        """Pages for every tensor, each rounded up to whole pages; all or nothing.

        Raises:
            ParamInvalidError: No such pool.
            OutOfMemoryError: They do not fit now.
        """
        pool = self.find(placement)
        size = -(-layout.tensor_nbytes // pool.page_nbytes)
        # Looked at first: a list of sizes for the most tensors that there can be would itself take 32 GiB.
        fits = layout.num_tensors * size <= pool.pages.free_pages
        sizes = [size] * layout.num_tensors if fits else []
        starts = pool.pages.allocate(sizes) if fits else None
        if starts is None:
            raise _exhausted(placement, pool, layout, size)
        addresses = np.array(starts, dtype=np.uint64) * np.uint64(pool.page_nbytes) + np.uint64(
            pool.memory.address
        )
        return addresses, _Allocation(pool, starts, sizes)

    def keep(self, cache_id: int, allocation: _Allocation) -> None:
        """The cache that got these pages."""
        self._allocations[cache_id] = allocation
        allocation.pool.caches += 1

    def has(self, cache_id: int) -> bool:
        """Whether that cache lives in a pool."""
        return cache_id in self._allocations

    def mark_unowned(self, cache_id: int) -> None:
        """Its owner has deallocated it; it lives on until its last key goes."""
        self._allocations[cache_id].unowned = True

    def is_unowned(self, cache_id: int) -> bool:
        """Whether it lives in a pool only for the keys that find it."""
        allocation = self._allocations.get(cache_id)
        return allocation is not None and allocation.unowned

    def free(self, cache_id: int) -> None:
        """Gives the pages of a cache back; nothing if it has none."""
        allocation = self._allocations.pop(cache_id, None)
        if allocation is not None:
            allocation.pool.caches -= 1
            self.give_back(allocation)

    def give_back(self, allocation: _Allocation) -> None:
        """Frees pages that no cache has (any more)."""
        allocation.pool.pages.free(allocation.starts, allocation.sizes)

    def info(self, placement: Placement) -> PoolInfo:
        """What is free and in use."""
        pool = self.find(placement)
        return PoolInfo(
            total_nbytes=pool.pages.pages * pool.page_nbytes,
            free_nbytes=pool.pages.free_pages * pool.page_nbytes,
            largest_free_nbytes=pool.pages.largest_free_pages * pool.page_nbytes,
            allocations=pool.caches,
        )


def _exhausted(placement: Placement, pool: _Pool, layout: Layout, size: int) -> OutOfMemoryError:
    needed, each, free, largest = (
        pages * pool.page_nbytes
        for pages in (layout.num_tensors * size, size, pool.pages.free_pages, pool.pages.largest_free_pages)
    )
    return OutOfMemoryError(
        f"{layout.num_tensors} tensors of {layout.tensor_nbytes} bytes need {needed} bytes of the {placement.name} "
        f"pool in pieces of {each}; {free} are free, the largest free piece has {largest}; deallocate caches, or "
        "pull or remove the keys that hold them"
    )
