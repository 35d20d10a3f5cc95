"""Caller 3, an older one: options written by hand, caches from a pool, pulled by request and released by it.

``python -m tests.integration.callers.pools prompt`` says its port; ``… decoder PORT`` pulls.
"""

from __future__ import annotations

import ctypes
import sys
import time

import numpy as np

from llm_datadist.v2.llm_datadist import LLMDataDist
from llm_datadist.v2.llm_types import (
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from tests.integration.callers import memory

TENSORS, BATCH, ROW_NBYTES, REQUESTS = 4, 2, 60_000, 12
POOL = '{"memory_size": 2097152, "page_shift": 12}'  # four caches


def initialised(role: LLMRole, cluster_id: int, **more: str) -> LLMDataDist:
    options = {
        "ge.exec.deviceId": "0",
        "llm.SyncKvCacheWaitTime": "5000",
        "llm.EnableCacheManager": "1",
        "llm.MemPoolConfig": POOL,
        **{f"llm.{key}": text for key, text in more.items()},
    }
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(options)
    return datadist


def slot(cache: Cache, tensor: int, batch: int) -> memory.Array:
    """A slot of a tensor, by its address."""
    address = cache.per_device_tensor_addrs[0][tensor] + batch * ROW_NBYTES
    return np.frombuffer((ctypes.c_uint8 * ROW_NBYTES).from_address(address), np.uint8)


def prefill() -> None:
    datadist = initialised(LLMRole.PROMPT, 1, listenIpInfo="127.0.0.1:0")
    manager, waited = datadist.cache_manager, 0
    assert datadist.listen_address is not None
    memory.say(str(datadist.listen_address[1]))
    desc = CacheDesc(TENSORS, [BATCH, ROW_NBYTES], DataType.DT_UINT8, Placement.DEVICE)
    for request in range(REQUESTS):
        keys = [
            CacheKey(prompt_cluster_id=1, req_id=2 * request + batch, model_id=0) for batch in range(BATCH)
        ]
        while True:
            try:
                cache = manager.allocate_cache(desc, keys)
                break
            except LLMException as exc:
                if exc.status_code != LLMStatusCode.LLM_OUT_OF_MEMORY:
                    raise
                waited += 1
                time.sleep(0.005)
        for tensor in range(TENSORS):
            for batch in range(BATCH):
                slot(cache, tensor, batch)[:] = memory.rows(tensor, [batch], ROW_NBYTES, request)[0]
        manager.deallocate_cache(cache)  # it lives until its requests are pulled
        memory.say(f"request {request}")
    memory.wait_for_the_end()
    datadist.finalize()
    memory.say(f"waited {waited > 0}")


def decode(port: int) -> None:
    datadist = initialised(LLMRole.DECODER, 2)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", port)
    assert datadist.link_clusters([cluster], 5000)[0] == LLMStatusCode.LLM_SUCCESS
    manager = datadist.cache_manager
    desc = CacheDesc(TENSORS, [1, ROW_NBYTES], DataType.DT_UINT8, Placement.DEVICE)
    for line in sys.stdin:
        request = int(line)
        for batch in range(BATCH):
            buffer = manager.allocate_cache(desc)
            manager.pull_cache(CacheKey(1, 2 * request + batch), buffer, 0)
            for tensor in range(TENSORS):
                expected = memory.rows(tensor, [batch], ROW_NBYTES, request)[0]
                assert np.array_equal(slot(buffer, tensor, 0), expected), (request, batch, tensor)
            manager.deallocate_cache(buffer)
        memory.say(f"pulled {request}")
    datadist.finalize()
    memory.say("closed")


if __name__ == "__main__":
    prefill() if sys.argv[1] == "prompt" else decode(int(sys.argv[2]))
