"""Paged caches, as engines with a block table have them: pull blocks, push blocks, push layer by layer.

Two processes: prefill (cluster 1) and decode (cluster 2). Mode: accessible, so that both may push.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Event

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    TransferWithCacheKeyConfig,
)

PREFILL, DECODE = 1, 2
LAYERS, BLOCK = 2, (16, 3, 64)  # tokens, KV heads, width of a head


class Computed(LayerSynchronizer):
    """The library waits here until a layer's KV is complete."""

    def __init__(self) -> None:
        self.layers = [Event() for _ in range(LAYERS)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.layers[layer_index].wait(timeout_in_millis and timeout_in_millis / 1000)


def start(role: LLMRole, cluster_id: int, listen: str | None = None) -> LLMDataDist:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    if listen is not None:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def register(datadist: LLMDataDist, blocks: int) -> tuple[list[np.ndarray], Cache]:
    """Memory of our own, K and V of each layer; peers find it by the key of this cluster."""
    tensors = [np.zeros((blocks, *BLOCK), np.float32) for _ in range(2 * LAYERS)]
    desc = CacheDesc(2 * LAYERS, (blocks, *BLOCK), DataType.DT_FLOAT)
    addresses, key = [tensor.ctypes.data for tensor in tensors], BlocksCacheKey(datadist.cluster_id)
    return tensors, datadist.cache_manager.register_blocks_cache(desc, addresses, key)


def prefill(pipe: Connection) -> None:
    datadist = start(LLMRole.PROMPT, PREFILL, "127.0.0.1:0")
    tensors, cache = register(datadist, 8)
    for i, tensor in enumerate(tensors):
        tensor[:] = (100 * i + np.arange(8)).reshape(8, 1, 1, 1)  # block b of tensor i holds 100 i + b
    pipe.send(datadist.listen_address)
    pipe.recv()  # decode has linked and pulled
    decodes = BlocksCacheKey(DECODE)
    datadist.cache_manager.push_blocks(decodes, cache, src_blocks=[5, 6], dst_blocks=[0, 4])
    print("prefill: pushed blocks 5, 6 to 0, 4", flush=True)
    computed = Computed()
    config = TransferWithCacheKeyConfig(decodes, src_layer_range=range(LAYERS), dst_layer_range=range(LAYERS))
    task = datadist.cache_manager.transfer_cache_async(
        cache, computed, [config], src_block_indices=[2, 3], dst_block_indices=[6, 3]
    )
    for layer in range(LAYERS):
        for tensor in tensors[2 * layer : 2 * layer + 2]:
            tensor[[2, 3]] += 0.5  # the layer is computed while the one before is on its way
        computed.layers[layer].set()
    print(f"prefill: pushed blocks 2, 3 to 6, 3 layer by layer: {task.synchronize()}", flush=True)
    pipe.send("pushed")
    pipe.recv()  # decode needs nothing any more
    datadist.finalize()


def decode(pipe: Connection) -> None:
    host, port = pipe.recv()
    datadist = start(LLMRole.DECODER, DECODE)
    tensors, cache = register(datadist, 7)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, port)
    print(f"decode: linked: {datadist.link_clusters([peer], timeout=5000)[0]}", flush=True)
    prefills = BlocksCacheKey(PREFILL)
    datadist.cache_manager.pull_blocks(prefills, cache, src_blocks=[7, 0, 4], dst_blocks=[1, 5, 2])
    print("decode: pulled blocks 7, 0, 4 into 1, 5, 2", flush=True)
    pipe.send("linked")
    pipe.recv()  # prefill has pushed
    blocks = [[100 * i + b for b in (5, 7, 4, 3.5, 6, 0, 2.5)] for i in range(2 * LAYERS)]
    for tensor, expected in zip(tensors, blocks, strict=True):
        assert (tensor == np.array(expected).reshape(7, 1, 1, 1)).all()
    print(f"decode: the blocks of tensor 1 hold {tensors[1][:, 0, 0, 0].tolist()}", flush=True)
    pipe.send("done")
    datadist.finalize()


if __name__ == "__main__":
    context = get_context("spawn")
    ends = context.Pipe()
    pairs = zip((prefill, decode), ends, strict=True)
    roles = [context.Process(target=role, args=(end,)) for role, end in pairs]
    for role in roles:
        role.start()
    for end in ends:
        end.close()
    for role in roles:
        role.join()
    sys.exit(any(role.exitcode for role in roles))
