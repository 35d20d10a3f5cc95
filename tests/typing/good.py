"""What callers write, and mypy --strict must accept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheInfo,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheNotExistError,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LinkInfo,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Notify,
    Placement,
    PoolInfo,
    Status,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.configs import LlmConfig
from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype, valid_np_dtypes
from llm_datadist.status import ParamInvalidError
from llm_datadist.utils import log
from llm_datadist.utils.utils import check_uint64
from llm_datadist.v2.cache_manager import CacheManager as OlderManager
from llm_datadist.v2.llm_datadist import LLMDataDist as OlderDist
from llm_datadist.v2.llm_types import CacheKey as OlderKey


def configured(port: int) -> dict[str, str]:
    config = LLMConfig()
    config.device_id = 0
    config.device_id = [0]
    config.device_id = (0,)
    config.sync_kv_timeout = 5000
    config.sync_kv_timeout = "5000"
    config.listen_ip_info = f"127.0.0.1:{port}"
    config.enable_cache_manager = True
    config.local_comm_res = ""
    config.ge_options["ge.flowGraphMemMaxSize"] = "1"
    config.mem_utilization = 0.9
    config.allow_ptrace = True
    timeout: int | str | None = config.sync_kv_timeout
    log.info("timeout %s", timeout)
    older: LLMConfig = LlmConfig()
    return {**config.generate_options(), **older.gen_options()}


def linked(dist: LLMDataDist, host: str | int) -> list[int]:
    info = LLMClusterInfo()
    info.remote_cluster_id = 2**64 - 1
    info.remote_role_type = LLMRole.PROMPT
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(host, 26000)
    info.append_remote_ip_info((host, 26000))
    overall, codes = dist.link_clusters([info], timeout=5000)
    why: str | None = dist.link_error(2)
    links: list[LinkInfo] = dist.links()
    if overall is not LLMStatusCode.LLM_SUCCESS:
        raise LLMException(why, links, status_code=codes[0])
    overall, codes = dist.unlink_clusters((info,), 100, force=True)
    return [int(code) for code in codes]


def moved(
    manager: CacheManager, addresses: Sequence[int], table: np.ndarray[Any, np.dtype[np.int64]]
) -> Cache:
    desc = CacheDesc(2, [8, 16], DataType.DT_BF16, Placement.DEVICE, seq_len_dim_index=1)
    desc.update_dim(0, 4)
    cache = manager.register_cache(desc, addresses, [CacheKey(1, 2), CacheKey(prompt_cluster_id=1, req_id=3)])
    paged = manager.register_blocks_cache(desc, addresses, BlocksCacheKey(prompt_cluster_id=1), True)
    manager.pull_cache(CacheKeyByIdAndIndex(1, 2, batch_index=3), cache, 0, -1, src_layer_range=range(2))
    manager.pull_blocks(BlocksCacheKey(1), paged, src_blocks=[1], dst_blocks=(2,), notify=("n", b"m"))
    manager.pull_blocks(BlocksCacheKey(1), paged, table, table.astype(np.uint32))
    manager.push_cache(CacheKeyByIdAndIndex(1, 2), cache, 0, range(1), range(1), -1, 1)
    manager.push_blocks(BlocksCacheKey(1), paged, [1], [2], tensor_num_per_layer=1)
    manager.unregister_cache(paged.cache_id)
    flat: list[int] = cache.per_device_tensor_addrs[0]
    return cache if flat else Cache.create_cpu_cache(desc, flat)


def pooled(manager: CacheManager, desc: CacheDesc) -> list[CacheInfo]:
    cache = manager.allocate_cache(desc, [CacheKey(1, 2)])
    paged = manager.allocate_blocks_cache(desc, BlocksCacheKey(1))
    manager.copy_cache(cache, cache, 1, 0, offset=0, size=-1, req_id=None)
    manager.copy_blocks(paged, {0: [1, 2]})
    manager.swap_blocks(paged, paged, {0: 1})
    manager.remove_cache_key(CacheKey(1, 2))
    manager.remap_registered_memory([MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 2)])
    manager.deallocate_cache(cache)
    manager.deallocate_blocks_cache(paged)
    pool: PoolInfo = manager.pool_info(Placement.HOST)
    return manager.caches() if pool.free_nbytes else []


class Synchronizer(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index >= 0


async def background(dist: LLMDataDist, cache: Cache) -> LLMStatusCode:
    manager = dist.cache_manager
    configs = [TransferConfig(1, [2, 3], range(1), 0)]
    keyed = [TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))]
    tasks: list[CacheTask] = [
        manager.transfer_cache_async(cache, Synchronizer(), configs),
        manager.transfer_cache_async(cache, Synchronizer(), keyed, [1], [2], 64),
        manager.pull_blocks_async(BlocksCacheKey(1), cache, [1], [2]),
        manager.pull_cache_async(CacheKey(1, 2), cache),
        manager.push_cache_async(CacheKeyByIdAndIndex(1, 2), cache, notify=("n", b"")),
        manager.push_blocks_async(BlocksCacheKey(1), cache, [1], [2]),
    ]
    tasks[0].add_done_callback(lambda task: task.synchronize())
    results: list[LLMStatusCode | None] = tasks[0].get_results(0)
    codes: list[LLMStatusCode] = list(await asyncio.gather(*(wait(task) for task in tasks)))
    dist.send_notify(1, "name", b"message")
    notifies: list[Notify] = dist.get_notifies()
    return codes[len(notifies) + len(results)]


async def wait(task: CacheTask) -> LLMStatusCode:
    return await task


def failed(error: LLMException) -> bool:
    if isinstance(error, CacheNotExistError):
        return bool(error.stale_blocks)
    return not Status(error.status_code).is_ok() or isinstance(error, ParamInvalidError)


def older(manager: OlderManager, dist: OlderDist, key: OlderKey) -> list[str]:
    same: tuple[CacheManager, LLMDataDist, CacheKey] = (manager, dist, key)
    kinds = (dtype_to_np_dtype[DataType.DT_FLOAT], np_dtype_to_dtype[np.dtype("int8")], valid_np_dtypes)
    return [*llm_datadist.v2_list, str(same), str(kinds), str(check_uint64("id", key.req_id))]
