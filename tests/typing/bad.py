"""What mypy --strict must refuse: each line with a mark, for the reason that the mark names, and no other line."""

from __future__ import annotations

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    MemInfo,
    TransferConfig,
)

llm_datadist.LLMDatadist()  # error: attr-defined
LLMDataDist(1, 2)  # error: arg-type
LLMDataDist(LLMRole.MIX, "2")  # error: arg-type
CacheKey()  # error: call-overload
CacheKey(1)  # error: call-overload
CacheKey(1, 2, prompt_cluster_id=3)  # error: call-overload
CacheKey(1, 2, requ_id=3)  # error: call-overload
CacheKeyByIdAndIndex(1)  # error: call-overload
BlocksCacheKey(model_id=1)  # error: call-overload
CacheDesc(2, 8, DataType.DT_INT8)  # error: arg-type
CacheDesc(2, [8], "int8")  # error: arg-type
MemInfo(0, 1, 2)  # error: arg-type
TransferConfig(1)  # error: call-arg
CacheKey(1, 2).req_id = 3  # error: misc


def configured(config: LLMConfig) -> None:
    config.listen_ip_info = 26000  # error: assignment
    config.enable_cache_manager = "1"  # error: assignment
    config.listen_ip = "127.0.0.1:0"  # error: attr-defined
    config.mem_utilization = "0.9"  # error: assignment


def used(dist: LLMDataDist, cache: Cache, info: LLMClusterInfo) -> None:
    manager = dist.cache_manager
    manager.pull_blocks(BlocksCacheKey(1), cache, [1], [2], range(1))  # error: call-arg
    manager.pull_cache(BlocksCacheKey(1), cache)  # error: arg-type
    manager.pull_cache(CacheKey(1, 2), cache.cache_id)  # error: arg-type
    manager.pull_cache(CacheKey(1, 2), cache, notify="done")  # error: arg-type
    manager.push_cache(CacheKey(1, 2), cache)  # error: arg-type
    manager.push_blocks(CacheKeyByIdAndIndex(1, 2), cache, [1], [2])  # error: arg-type
    manager.register_cache(cache.cache_desc, 16)  # error: arg-type
    manager.unregister_cache(cache)  # error: arg-type
    manager.transfer_cache_async(cache, lambda layer, timeout: True, [])  # error: arg-type
    dist.link_clusters(info)  # error: arg-type
    dist.send_notify(1, "name", "message")  # error: arg-type
    dist.init({"llm.EnableCacheManager": 1})  # error: dict-item
    done: bool = manager.pull_cache_async(CacheKey(1, 2), cache)  # error: assignment
    assert done


class Synchronizer(LayerSynchronizer):
    def synchronize_layer(self, layer_index: str, timeout_in_millis: int | None) -> bool:  # error: override
        return bool(layer_index)
