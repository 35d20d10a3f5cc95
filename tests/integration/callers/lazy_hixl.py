"""Caller 2: backend "hixl", options edited in place, links made when the first request needs them.

``python -m tests.integration.callers.lazy_hixl prompt`` says its port; ``… decoder PORT`` pulls.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from tests.integration.callers import memory

PROMPT_ID, DECODER_ID = 2**63 + 7, 2**63 + 8
TENSORS, BLOCKS, ROW_NBYTES, SEED = 16, 32, 512, 5


class Connector:
    """One side."""

    def __init__(self, role: LLMRole, cluster_id: int, seed: int | None) -> None:
        config = LLMConfig()
        config.transfer_backend = "hixl"
        config.local_comm_res = ""
        config.listen_ip_info = "127.0.0.1:0"
        config.sync_kv_timeout = "10000"
        config.ge_options["ge.flowGraphMemMaxSize"] = "1073741824"
        self.datadist = LLMDataDist(role, cluster_id)
        self.datadist.init(config.generate_options())
        self.cache_manager = self.datadist.cache_manager
        self.tensors = memory.kv_tensors(TENSORS, BLOCKS, ROW_NBYTES, seed)
        desc = CacheDesc(num_tensors=TENSORS, shape=[BLOCKS, ROW_NBYTES], data_type=DataType.DT_INT8)
        key = BlocksCacheKey(cluster_id, 0) if role == LLMRole.PROMPT else None
        self.cache = self.cache_manager.register_blocks_cache(desc, memory.addresses(self.tensors), key)
        self._linked: set[int] = set()
        self._lock = threading.Lock()

    def ensure_linked(self, remote_id: int, port: int) -> None:
        with self._lock:
            if remote_id in self._linked:
                return
            cluster = LLMClusterInfo()
            cluster.remote_cluster_id = remote_id
            cluster.append_remote_ip_info("127.0.0.1", port)
            overall, codes = self.datadist.link_clusters([cluster], timeout=5000)
            if overall not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK):
                raise LLMException(f"link to {remote_id}: {codes}", status_code=overall)
            self._linked.add(remote_id)

    def unlink(self, remote_id: int) -> None:
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = remote_id
        overall, _ = self.datadist.unlink_clusters([cluster], force=True)
        assert overall == LLMStatusCode.LLM_SUCCESS, overall
        self._linked.discard(remote_id)


def decode(port: int) -> None:
    connector = Connector(LLMRole.DECODER, DECODER_ID, None)

    def request(block: int) -> None:
        connector.ensure_linked(PROMPT_ID, port)
        layers = range(TENSORS // 2)
        for half in (layers[:4], layers[4:]):
            connector.cache_manager.pull_blocks(
                BlocksCacheKey(prompt_cluster_id=PROMPT_ID, model_id=0),
                connector.cache,
                src_blocks=[block + 1],
                dst_blocks=[block],
                src_layer_range=half,
                dst_layer_range=half,
            )

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(request, range(0, 16)))
    memory.check(connector.tensors, range(16), range(1, 17), SEED)
    memory.say("pulled")
    connector.unlink(PROMPT_ID)
    request(20)  # links again
    connector.unlink(PROMPT_ID)
    connector.datadist.finalize()
    memory.say("closed")


def prefill() -> None:
    connector = Connector(LLMRole.PROMPT, PROMPT_ID, SEED)
    address = connector.datadist.listen_address
    assert address is not None
    memory.say(str(address[1]))
    memory.wait_for_the_end()
    connector.datadist.finalize()
    memory.say("closed")


if __name__ == "__main__":
    prefill() if sys.argv[1] == "prompt" else decode(int(sys.argv[2]))
