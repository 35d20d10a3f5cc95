"""One engine with one blocks cache, driven through the public interface."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import llm_datadist as dd
from benchmarks.measure import Unavailable
from llm_datadist.testing.owner import pattern

OWNER_ID, READER_ID = 1, 2
_PAGE_SHIFT = 16
_CALL_MS = 120_000


@dataclass(frozen=True)
class Kv:
    """T tensors of ``blocks`` blocks, of which ``pulled`` move, in independent random order on both sides."""

    tensors: int
    blocks: int
    pulled: int
    block_nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        return self.blocks * self.block_nbytes

    @property
    def nbytes(self) -> int:
        """Moved by one pull."""
        return self.tensors * self.pulled * self.block_nbytes

    def lists(self, seed: int = 0) -> tuple[list[int], list[int]]:
        """Source and destination blocks."""
        rng = np.random.default_rng(seed)
        source, destination = (rng.permutation(self.blocks)[: self.pulled].tolist() for _ in range(2))
        return source, destination

    def __str__(self) -> str:
        size = self.block_nbytes
        block = f"{size >> 10} KiB" if size >= 1024 and not size % 1024 else f"{size} B"
        return f"kv {block}, T={self.tensors}, {self.pulled} blocks"


def views(addresses: Sequence[int], nbytes: int) -> list[NDArray[np.uint8]]:
    """Memory at these addresses as arrays."""
    return [np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at)) for at in addresses]


def fill(addresses: Sequence[int], nbytes: int, seed: int) -> None:
    """Gives every tensor bytes of its own."""
    for i, view in enumerate(views(addresses, nbytes)):
        view[:] = pattern(seed + i, nbytes)


class Side:
    """An initialised engine; several may live in one process.

    Args:
        cluster_id: Its id.
        backend: The transport to force.
        listen: Where to listen ("ip:0"), if at all.
        mode: "A" or "B".
        threads: Movers of one transfer; 0: by machine.
        pool_nbytes: Size of its pool; 0: none.

    Raises:
        Unavailable: It cannot be initialised so; the text is the library's.
    """

    def __init__(
        self, cluster_id: int, backend: str, listen: str = "", mode: str = "B", threads: int = 0,
        pool_nbytes: int = 0,
    ) -> None:  # fmt: skip
        options = {
            "llm.EnableCacheManager": "1",
            "llm.EnableRemoteCacheAccessible": str(int(mode == "B")),
            "llm.TransferBackend": backend,
            "llm.SyncKvCacheWaitTime": str(_CALL_MS),
            "llm.TransferThreads": str(threads),
            "llm.AllowMultipleInstances": "1",
        }
        if listen:
            options["llm.listenIpInfo"] = listen
        if pool_nbytes:
            pool = {"memory_size": pool_nbytes, "page_shift": _PAGE_SHIFT}
            options["llm.MemPoolConfig"] = json.dumps(pool)
        self.dist = dd.LLMDataDist(dd.LLMRole.MIX, cluster_id)
        self._cluster_id = cluster_id
        try:
            self.dist.init(options)
        except dd.LLMException as exc:
            raise Unavailable(f"init with transfer_backend={backend!r}: {exc}") from exc

    def register(self, kv: Kv, addresses: Sequence[int]) -> dd.Cache:
        """Makes memory a blocks cache that peers find by our id."""
        key = dd.BlocksCacheKey(self._cluster_id, 0)
        return self.dist.cache_manager.register_blocks_cache(_desc(kv), list(addresses), key)

    def allocate(self, kv: Kv, seed: int) -> dd.Cache:
        """A blocks cache of pool memory, filled."""
        key = dd.BlocksCacheKey(self._cluster_id, 0)
        cache = self.dist.cache_manager.allocate_blocks_cache(_desc(kv), key)
        fill(cache.tensor_addrs, kv.tensor_nbytes, seed)
        return cache

    def link(self, cluster_id: int, address: Sequence[object]) -> None:
        """Links with a listening peer.

        Raises:
            Unavailable: It cannot be linked; the text is the library's.
        """
        peer = dd.LLMClusterInfo()
        peer.remote_cluster_id = cluster_id
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info(*address)  # type: ignore[arg-type]
        overall, _ = self.dist.link_clusters([peer], 10_000)
        if overall != dd.LLMStatusCode.LLM_SUCCESS:
            raise Unavailable(f"link: {self.dist.link_error(cluster_id) or overall}")

    def unlink(self, cluster_id: int) -> None:
        """The end of a ``link``."""
        peer = dd.LLMClusterInfo()
        peer.remote_cluster_id = cluster_id
        overall, _ = self.dist.unlink_clusters([peer], 10_000)
        if overall != dd.LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"unlink_clusters ended with {overall}")

    def pull(self, cache: dd.Cache, cluster_id: int, kv: Kv, seed: int = 0) -> Callable[[], None]:
        """A call that pulls the blocks of ``kv``."""
        key = dd.BlocksCacheKey(cluster_id, 0)
        source, destination = kv.lists(seed)
        pull = self.dist.cache_manager.pull_blocks
        return lambda: pull(key, cache, source, destination)

    def close(self) -> None:
        self.dist.finalize()


def pool_nbytes(kv: Kv) -> int:
    """Pool that holds one such cache."""
    page = 1 << _PAGE_SHIFT
    return kv.tensors * -(-kv.tensor_nbytes // page) * page


def _desc(kv: Kv) -> dd.CacheDesc:
    shape = [kv.blocks, kv.block_nbytes]
    return dd.CacheDesc(kv.tensors, shape, dd.DataType.DT_UINT8, dd.Placement.DEVICE)
