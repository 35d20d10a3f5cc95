"""What the cache manager tells about its caches and pools."""

from __future__ import annotations

from dataclasses import dataclass

from llm_datadist.caches import CacheDesc
from llm_datadist.keys import BlocksCacheKey, CacheKey


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """One cache of this process.

    Attributes:
        cache_id: Its id.
        kind: "cache" or "blocks".
        desc: What it is made of.
        keys: The keys that find it now.
        remote_accessible: Whether peers may name it in accessible mode.
        allocated: Whether its memory is a pool's.
        leases: Reads by peers that hold it now (managed mode, and pushes of ours).
    """

    cache_id: int
    kind: str
    desc: CacheDesc
    keys: tuple[CacheKey | BlocksCacheKey, ...]
    remote_accessible: bool
    allocated: bool
    leases: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What is free and in use in one pool.

    Attributes:
        total_nbytes: Bytes of the pool, whole pages.
        free_nbytes: Bytes that no cache has.
        largest_free_nbytes: Bytes of the longest free piece: the largest tensor that fits now.
        allocations: Caches that live in it.
    """

    total_nbytes: int
    free_nbytes: int
    largest_free_nbytes: int
    allocations: int
