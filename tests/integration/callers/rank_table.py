"""Callers 1 and 5: caches of one model under model ids, linked by a rank table, pulled from executor threads.

``python -m tests.integration.callers.rank_table ROLE LAYOUT WORKERS RANK_TABLE``
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
    RegisterMemStatus,
)
from tests.integration.callers import memory

PROMPT_ID, DECODER_ID = 0, 1
LAYERS, BLOCKS = 8, 64
# layout -> (tensors, bytes of a block) of the cache of each model id
LAYOUTS = {
    "gqa": [(2 * LAYERS, 2048)],
    "mla": [(LAYERS, 1024), (LAYERS, 128)],
    "sparse": [(LAYERS, 1024), (LAYERS, 128), (LAYERS, 132)],
}


class Connector:
    """One side."""

    def __init__(self, role: str, layout: str, rank_table: str) -> None:
        is_prompt = role == "prompt"
        self.cluster_id = PROMPT_ID if is_prompt else DECODER_ID
        self.remote_id = DECODER_ID if is_prompt else PROMPT_ID
        self.tensors_per_layer = 2 if layout == "gqa" else 1
        self.llm_datadist = LLMDataDist(LLMRole.PROMPT if is_prompt else LLMRole.DECODER, self.cluster_id)
        llm_config = LLMConfig()
        llm_config.device_id = 0
        llm_config.sync_kv_timeout = 20000
        llm_config.enable_switch_role = True
        llm_config.enable_cache_manager = True
        llm_config.enable_remote_cache_accessible = True
        self.llm_datadist.init(llm_config.generate_options())
        self.cache_manager = self.llm_datadist.cache_manager
        self.caches: list[tuple[Cache, list[memory.Array]]] = []
        for model_id, (tensors, row_nbytes) in enumerate(LAYOUTS[layout]):
            self.register(
                model_id, memory.kv_tensors(tensors, BLOCKS, row_nbytes, model_id if is_prompt else None)
            )
        self.link(rank_table)

    def register(self, model_id: int, tensors: list[memory.Array]) -> None:
        desc = CacheDesc(len(tensors), tuple(tensors[0].shape), DataType.DT_UINT8, Placement.DEVICE)
        key = BlocksCacheKey(self.cluster_id, model_id)
        cache = self.cache_manager.register_blocks_cache(
            desc, memory.addresses(tensors), key, remote_accessible=True
        )
        self.caches.append((cache, tensors))

    def link(self, rank_table: str) -> None:
        ranks = {PROMPT_ID: 0, DECODER_ID: 1}
        self.comm_id: int = self.llm_datadist.link("pd_comm_0", ranks, rank_table)
        while True:
            status = self.llm_datadist.query_register_mem_status(self.comm_id)
            if status == RegisterMemStatus.OK:
                return
            if status == RegisterMemStatus.FAILED:
                raise RuntimeError(f"link failed: {self.llm_datadist.link_error(self.remote_id)}")
            time.sleep(0.05)

    def pull(self, remote_blocks: list[int], local_blocks: list[int]) -> None:
        for model_id, (cache, tensors) in enumerate(self.caches):
            layers = range(len(tensors) // self.tensors_per_layer)
            self.cache_manager.pull_blocks(
                BlocksCacheKey(self.remote_id, model_id),
                cache,
                src_blocks=remote_blocks,
                dst_blocks=local_blocks,
                src_layer_range=layers,
                dst_layer_range=layers,
                tensor_num_per_layer=self.tensors_per_layer,
            )

    def close(self) -> None:
        self.llm_datadist.unlink(self.comm_id)
        for cache, _ in self.caches:
            self.cache_manager.unregister_cache(cache.cache_id)
        self.llm_datadist.finalize()


def main(role: str, layout: str, workers: str, rank_table: str) -> None:
    connector = Connector(role, layout, rank_table)
    memory.say("linked")
    if role == "decoder":
        requests: list[Any] = [([BLOCKS - 1 - block], [block]) for block in range(0, BLOCKS, 2)]
        with ThreadPoolExecutor(int(workers)) as executor:
            for done in [executor.submit(connector.pull, *request) for request in requests]:
                done.result()
        got = [local for _, (local,) in requests]
        for model_id, (_, tensors) in enumerate(connector.caches):
            memory.check(tensors, got, [remote for (remote,), _ in requests], seed=model_id)
        memory.say("pulled")
    memory.wait_for_the_end()
    connector.close()
    memory.say("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
