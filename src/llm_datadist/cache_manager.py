"""CacheManager: caches of this process, copies between them, and (from its base) transfers with peers.

Every call checks the state first, then types and ranges, and hands plain values or a frozen request to the
engine, which checks everything that needs to know a cache or a peer. Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llm_datadist._core.indices import as_indices
from llm_datadist._core.requests import CopyBlocks, CopyCache, SwapBlocks
from llm_datadist._engine.errands import Errand, handed_in
from llm_datadist.caches import Cache, CacheDesc, MemInfo
from llm_datadist.checks import check_int64, check_isinstance, check_list_uint64, check_uint32, check_uint64
from llm_datadist.enums import Placement
from llm_datadist.infos import CacheInfo, PoolInfo
from llm_datadist.keys import BlocksCacheKey, CacheKey
from llm_datadist.status import ParamInvalidError
from llm_datadist.transfer_requests import entries_of
from llm_datadist.transfers import Transfers


class CacheManager(Transfers):
    """Registers caches and moves them. Got from ``LLMDataDist.cache_manager``."""

    # ---- memory of the caller ------------------------------------------------------------------------

    @handed_in
    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Errand[Cache]:
        """Makes memory of the caller a cache; dim 0 counts slots.

        Args:
            cache_desc: What it is made of; num_tensors >= 1.
            addrs: Address of each tensor; memory that is mapped and readable.
            cache_keys: The i-th key finds slot i; a key without req_id and prefix_id is a placeholder.
            remote_accessible: Whether peers may name it in mode B. None: True for DEVICE, False for HOST.

        Returns:
            A handle with the cache's id.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            ParamInvalidError: Number of addresses or keys, an address, a key that is bound already.
        """
        engine = self._live()
        addresses = _checked_registration(cache_desc, addrs, remote_accessible)
        keys = entries_of("cache_keys", cache_keys, CacheKey)
        return engine.register(cache_desc, addresses, keys, False, remote_accessible)

    @handed_in
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Errand[Cache]:
        """Makes memory of the caller a paged cache; dim 0 counts blocks.

        Args:
            cache_desc: What it is made of; num_tensors >= 1.
            addrs: Address of each tensor; memory that is mapped and readable.
            blocks_cache_key: Finds the cache; taken over from an older cache that has it.
            remote_accessible: Whether peers may name it in mode B. None: True for DEVICE, False for HOST.

        Returns:
            A handle with the cache's id.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            ParamInvalidError: Number of addresses, or an address.
        """
        engine = self._live()
        addresses = _checked_registration(cache_desc, addrs, remote_accessible)
        key = _checked_blocks_key(blocks_cache_key)
        return engine.register(cache_desc, addresses, key, True, remote_accessible)

    @handed_in
    def unregister_cache(self, cache_id: int) -> Errand[None]:
        """Ends a cache; an unknown id is fine. When it returns, the memory may be freed.

        An allocated cache is freed at once, whatever keys find it.

        Raises:
            TypeError: Not an int.
            ValueError: Outside int64.
        """
        engine = self._live()
        return engine.unregister(check_int64("cache_id", cache_id))

    @handed_in
    def remap_registered_memory(self, mem_infos: MemInfo | Sequence[MemInfo]) -> Errand[None]:
        """Tells that memory was mapped anew: its caches are checked again, and peers must look again.

        Reads that began before fail with LLM_KV_CACHE_NOT_EXIST at the peer; ids and keys stay.

        Args:
            mem_infos: One range or several, all MEM_TYPE_DEVICE.

        Raises:
            TypeError: Not MemInfo.
            ParamInvalidError: An empty list, a range that is not device memory, has address 0 or no size, or
                is not mapped; a cache in it that is not. Nothing has changed then.
        """
        engine = self._live()
        if isinstance(mem_infos, MemInfo):
            mem_infos = (mem_infos,)
        ranges = entries_of("mem_infos", mem_infos, MemInfo)
        if not ranges:
            raise ParamInvalidError("mem_infos is empty; name at least one range")
        return engine.remap(ranges)

    # ---- memory of a pool ----------------------------------------------------------------------------

    @handed_in
    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Errand[Cache]:
        """Makes a cache in the pool of its placement; peers may name it in both modes.

        It lives until ``deallocate_cache`` and until all its keys are gone: pulled (mode A) or removed.

        Args:
            cache_desc: What it is made of; num_tensors >= 1.
            cache_keys: The i-th key finds slot i; a key without req_id and prefix_id is a placeholder.

        Returns:
            A handle with the cache's id and addresses.

        Raises:
            TypeError: A wrong type.
            ParamInvalidError: No such pool, or a rule about shape and keys.
            OutOfMemoryError: The pool has no room now.
        """
        engine = self._live()
        _check_desc(cache_desc)
        return engine.allocate(cache_desc, entries_of("cache_keys", cache_keys, CacheKey), False)

    @handed_in
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Errand[Cache]:
        """Makes a paged cache in the pool of its placement; peers may name it in both modes.

        Args:
            cache_desc: What it is made of; num_tensors >= 1.
            blocks_cache_key: Finds the cache; taken over from an older cache that has it.

        Returns:
            A handle with the cache's id and addresses.

        Raises:
            TypeError: A wrong type.
            ParamInvalidError: No such pool, or a rule about the shape.
            OutOfMemoryError: The pool has no room now.
        """
        engine = self._live()
        _check_desc(cache_desc)
        return engine.allocate(cache_desc, _checked_blocks_key(blocks_cache_key), True)

    @handed_in
    def deallocate_cache(self, cache: Cache) -> Errand[None]:
        """Gives an allocated cache back; one that keys still find stays until they are gone.

        A cache that is not allocated (any more) is fine.

        Raises:
            TypeError: Not a Cache.
            ParamInvalidError: A blocks cache.
        """
        engine = self._live()
        return engine.deallocate(check_isinstance("cache", cache, Cache), False)

    @handed_in
    def deallocate_blocks_cache(self, cache: Cache) -> Errand[None]:
        """Gives an allocated blocks cache back, after the transfers in flight.

        A cache that is not allocated (any more) is fine.

        Raises:
            TypeError: Not a Cache.
            ParamInvalidError: Not a blocks cache.
        """
        engine = self._live()
        return engine.deallocate(check_isinstance("cache", cache, Cache), True)

    @handed_in
    def remove_cache_key(self, cache_key: CacheKey) -> Errand[None]:
        """Takes a key away from whatever cache it finds; an unknown one is fine, its cluster id is ignored.

        Raises:
            TypeError: Not a CacheKey.
            ParamInvalidError: It has both a req_id and a prefix_id.
        """
        engine = self._live()
        return engine.remove_key(check_isinstance("cache_key", cache_key, CacheKey))

    def pool_info(self, placement: Placement) -> PoolInfo:
        """What is free and in use in the pool of a placement.

        Raises:
            TypeError: Not a Placement.
            ParamInvalidError: There is no such pool.
        """
        engine = self._live()
        return engine.pool_info(check_isinstance("placement", placement, Placement))

    def caches(self) -> list[CacheInfo]:
        """All caches of this process, in order of their ids."""
        return self._live().caches()

    # ---- copies within this process --------------------------------------------------------------------

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copies bytes [offset, offset + size) of a slot of ``src`` to the same bytes of a slot of ``dst``.

        Args:
            dst: Where to; not a blocks cache, as many tensors as ``src``.
            src: Where from; not a blocks cache.
            dst_batch_index: Slot of ``dst``, uint32.
            src_batch_index: Slot of ``src``, uint32.
            offset: First byte, within both slots.
            size: Bytes per tensor; -1: to the end of the source slot.
            req_id: Accepted, without effect.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_FAILED, LLM_ENGINE_FINALIZED.
        """
        engine = self._live()
        request = CopyCache(
            dst=check_isinstance("dst", dst, Cache),
            src=check_isinstance("src", src, Cache),
            dst_batch_index=check_uint32("dst_batch_index", dst_batch_index),
            src_batch_index=check_uint32("src_batch_index", src_batch_index),
            offset=check_int64("offset", offset),
            size=check_int64("size", size),
        )
        if req_id is not None:
            check_uint64("req_id", req_id)
        engine.copy(request)

    def copy_blocks(self, cache: Cache, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copies blocks within a blocks cache, as if all were read before any is written.

        Args:
            cache: A blocks cache.
            copy_block_info: The destinations of each source block, none named twice; may be empty.

        Raises:
            TypeError: A wrong type.
            ValueError: A block index outside uint64.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_FAILED, LLM_ENGINE_FINALIZED.
        """
        engine = self._live()
        check_isinstance("cache", cache, Cache)
        check_isinstance("copy_block_info", copy_block_info, dict)
        named_blocks = as_indices("copy_block_info", list(copy_block_info))
        sources: list[int] = []
        destinations: list[int] = []
        for block, copies in copy_block_info.items():
            named = as_indices(f"copy_block_info[{block}]", copies).tolist()
            sources += [int(block)] * len(named)
            destinations += named
        engine.copy(
            CopyBlocks(
                cache,
                named_blocks,
                as_indices("copy_block_info", sources),
                as_indices("copy_block_info", destinations),
            )
        )

    def swap_blocks(self, src: Cache, dst: Cache, src_to_dst: Mapping[int, int]) -> None:
        """Copies blocks between host and device; the source keeps its own.

        Args:
            src: A blocks cache, also one of ``Cache.create_cpu_cache``.
            dst: A blocks cache of the other placement, with equal blocks and as many tensors.
            src_to_dst: The destination of each source block, none named twice; may be empty.

        Raises:
            TypeError: A wrong type.
            ValueError: A block index outside uint64.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_FAILED, LLM_ENGINE_FINALIZED.
        """
        engine = self._live()
        check_isinstance("src", src, Cache)
        check_isinstance("dst", dst, Cache)
        check_isinstance("src_to_dst", src_to_dst, dict)
        engine.copy(
            SwapBlocks(
                src,
                dst,
                as_indices("src_to_dst", list(src_to_dst)),
                as_indices("src_to_dst.values()", list(src_to_dst.values())),
            )
        )


def _check_desc(desc: Any) -> None:
    check_isinstance("cache_desc", desc, CacheDesc)
    if desc.num_tensors == 0:
        raise ParamInvalidError("cache_desc.num_tensors is 0; a cache has at least one tensor")


def _checked_blocks_key(key: Any) -> tuple[BlocksCacheKey, ...]:
    check_isinstance("blocks_cache_key", key, BlocksCacheKey, True)
    return () if key is None else (key,)


def _checked_registration(desc: Any, addrs: Any, remote_accessible: Any) -> tuple[int, ...]:
    check_isinstance("cache_desc", desc, CacheDesc)
    addresses = check_list_uint64("addrs", addrs)
    check_isinstance("remote_accessible", remote_accessible, bool, True)
    _check_desc(desc)
    if len(addresses) != desc.num_tensors:
        raise ParamInvalidError(
            f"addrs has {len(addresses)} addresses; cache_desc has {desc.num_tensors} tensors"
        )
    if 0 in addresses:
        raise ParamInvalidError(
            f"addrs[{addresses.index(0)}] is 0; {desc.size} bytes of mapped memory must begin at each address"
        )
    return addresses
