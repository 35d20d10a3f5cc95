"""Each kind of number has its range, wherever a public call takes it; NumPy integers count, bool and float do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    MemInfo,
    Memtype,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.api.conftest import Make

DESC = CacheDesc(2, [4, 8], DataType.DT_UINT8)
CACHE, BLOCKS = Cache(1, DESC, [16, 32]), Cache(2, DESC, [16, 32], True)
KEY, BY_ID, OF_MODEL = CacheKey(2, 3), CacheKeyByIdAndIndex(2, 5, 1), BlocksCacheKey(2)

Use = Callable[[Any, Any], Any]


def _cluster(value: Any) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = value
    return info


def _port(value: Any, method: str) -> None:
    getattr(LLMClusterInfo(), method)("127.0.0.1", value)


def _linked(dist: Any, method: str, timeout: Any) -> None:
    info = _cluster(2)
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", 1)
    getattr(dist, method)([info], timeout)


# What takes the value: (the initialised dist, the value) -> whatever.
UINT64: dict[str, Use] = {
    "cluster_id": lambda d, v: LLMDataDist(LLMRole.MIX, v),
    "remote_cluster_id": lambda d, v: _cluster(v),
    "check_link_status": lambda d, v: d.check_link_status(v),
    "link_error": lambda d, v: d.link_error(v),
    "send_notify": lambda d, v: d.send_notify(v, "n", b""),
    "comm id of unlink": lambda d, v: d.unlink(v),
    "comm id of query": lambda d, v: d.query_register_mem_status(v),
    "cluster id of link": lambda d, v: d.link("c", {v: 0}, "{}"),
    "CacheKey.cluster_id": lambda d, v: CacheKey(v, 1),
    "CacheKey.req_id": lambda d, v: CacheKey(1, v),
    "CacheKey.model_id": lambda d, v: CacheKey(1, 1, v),
    "CacheKey.prefix_id": lambda d, v: CacheKey(1, 1, 0, v),
    "CacheKeyByIdAndIndex.cluster_id": lambda d, v: CacheKeyByIdAndIndex(v, 1),
    "BlocksCacheKey.cluster_id": lambda d, v: BlocksCacheKey(v),
    "BlocksCacheKey.model_id": lambda d, v: BlocksCacheKey(1, v),
    "dst_cluster_id": lambda d, v: TransferConfig(v, [16, 32]),
    "dst_addrs": lambda d, v: TransferConfig(1, [16, v]),
    "addrs": lambda d, v: d.cache_manager.register_cache(DESC, [16, v]),
    "addrs of blocks": lambda d, v: d.cache_manager.register_blocks_cache(DESC, [16, v]),
    "MemInfo.addr": lambda d, v: MemInfo(Memtype.MEM_TYPE_DEVICE, v, 1),
    "src_blocks": lambda d, v: d.cache_manager.pull_blocks(OF_MODEL, BLOCKS, [v], [0]),
    "dst_blocks": lambda d, v: d.cache_manager.pull_blocks(OF_MODEL, BLOCKS, [0], [v]),
    "copy_blocks from": lambda d, v: d.cache_manager.copy_blocks(BLOCKS, {v: [0]}),
    "copy_blocks to": lambda d, v: d.cache_manager.copy_blocks(BLOCKS, {0: [v]}),
    "req_id of copy_cache": lambda d, v: d.cache_manager.copy_cache(CACHE, CACHE, req_id=v),
}
INT64: dict[str, Use] = {
    "cache_id": lambda d, v: CacheKeyByIdAndIndex(1, v),
    "unregister_cache": lambda d, v: d.cache_manager.unregister_cache(v),
    "size of pull_cache": lambda d, v: d.cache_manager.pull_cache(KEY, CACHE, 0, v),
    "size of push_cache": lambda d, v: d.cache_manager.push_cache(BY_ID, CACHE, size=v),
    "size of copy_cache": lambda d, v: d.cache_manager.copy_cache(CACHE, CACHE, size=v),
}
UINT32: dict[str, Use] = {
    "num_tensors": lambda d, v: CacheDesc(v, [4], DataType.DT_INT8),
    "key's batch_index": lambda d, v: CacheKeyByIdAndIndex(1, 2, v),
    "batch_index": lambda d, v: d.cache_manager.pull_cache(KEY, CACHE, v),
    "src_batch_index": lambda d, v: d.cache_manager.push_cache(BY_ID, CACHE, v),
    "dst_batch_index of copy_cache": lambda d, v: d.cache_manager.copy_cache(CACHE, CACHE, v),
    "src_batch_index of copy_cache": lambda d, v: d.cache_manager.copy_cache(CACHE, CACHE, 0, v),
    "src_batch_index of a config": lambda d, v: TransferConfig(1, [16, 32], range(1), v),
    "src_batch_index of a keyed config": lambda d, v: TransferWithCacheKeyConfig(
        OF_MODEL, range(1), range(1), v
    ),
    "tensor_num_per_layer of pull_cache": lambda d, v: d.cache_manager.pull_cache(
        KEY, CACHE, tensor_num_per_layer=v
    ),
    "tensor_num_per_layer of pull_blocks": lambda d, v: d.cache_manager.pull_blocks(
        OF_MODEL, BLOCKS, [0], [0], tensor_num_per_layer=v
    ),
    "tensor_num_per_layer of push_cache": lambda d, v: d.cache_manager.push_cache(
        BY_ID, CACHE, tensor_num_per_layer=v
    ),
    "tensor_num_per_layer of push_blocks": lambda d, v: d.cache_manager.push_blocks(
        OF_MODEL, BLOCKS, [0], [0], tensor_num_per_layer=v
    ),
}
UINT16: dict[str, Use] = {
    "port of this side": lambda d, v: _port(v, "append_local_ip_info"),
    "port of the peer": lambda d, v: _port(v, "append_remote_ip_info"),
}
INT32: dict[str, Use] = {
    "timeout of link_clusters": lambda d, v: _linked(d, "link_clusters", v),
    "timeout of unlink_clusters": lambda d, v: _linked(d, "unlink_clusters", v),
    "timeout of drain": lambda d, v: d.drain(v),
}


def _cases(uses: dict[str, Use], low: int, high: int) -> list[Any]:
    return [pytest.param(use, low, high, id=name) for name, use in uses.items()]


def _holds(make: Make, use: Use, low: int, high: int) -> None:
    dist, _ = make()
    for outside in (low - 1, high + 1):
        with pytest.raises(ValueError, match=str(outside)):
            use(dist, outside)
    for no_integer in (True, 1.0, "1", np.float32(1), np.bool_(True)):
        with pytest.raises(TypeError):
            use(dist, no_integer)
    for inside in (low, high, np.array(high)[()], np.int8(1)):
        try:
            use(dist, inside)
        except LLMException as refused:  # by a rule of that call, not for its range or type
            assert not isinstance(refused, ValueError)


@pytest.mark.rule("1.25", "1.30", "1.31", "2.21")
@pytest.mark.parametrize(("use", "low", "high"), _cases(UINT64, 0, 2**64 - 1))
def test_ids_keys_addresses_and_block_indices_are_uint64(make: Make, use: Use, low: int, high: int) -> None:
    _holds(make, use, low, high)


@pytest.mark.rule("1.26")
@pytest.mark.parametrize(("use", "low", "high"), _cases(INT64, -(2**63), 2**63 - 1))
def test_cache_ids_and_sizes_are_int64(make: Make, use: Use, low: int, high: int) -> None:
    _holds(make, use, low, high)


@pytest.mark.rule("1.27", "2.9")
@pytest.mark.parametrize(("use", "low", "high"), _cases(UINT32, 0, 2**32 - 1))
def test_batch_indices_and_numbers_of_tensors_are_uint32(make: Make, use: Use, low: int, high: int) -> None:
    _holds(make, use, low, high)


@pytest.mark.rule("1.28", "4.4")
@pytest.mark.parametrize(("use", "low", "high"), _cases(UINT16, 0, 2**16 - 1))
def test_ports_are_uint16(make: Make, use: Use, low: int, high: int) -> None:
    _holds(make, use, low, high)


@pytest.mark.rule("1.29")
@pytest.mark.parametrize(("use", "low", "high"), _cases(INT32, -(2**31), 2**31 - 1))
def test_timeouts_are_int32(make: Make, use: Use, low: int, high: int) -> None:
    _holds(make, use, low, high)
