"""Contiguous caches, one slot per request: pull by key, pull by id, push layer by layer to addresses.

Two processes: prefill (cluster 1) owns the KV, decode (cluster 2) wants it. Mode: managed, the default.
"""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Event

import numpy as np

from llm_datadist import (
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
    TransferConfig,
)

PREFILL, DECODE = 1, 2
LAYERS, SLOT = 2, 1000  # floats of one request in one tensor


class Computed(LayerSynchronizer):
    """The library waits here until a layer's KV is complete."""

    def __init__(self) -> None:
        self.layers = [Event() for _ in range(LAYERS)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.layers[layer_index].wait(timeout_in_millis and timeout_in_millis / 1000)


def start(role: LLMRole, cluster_id: int, listen: str | None = None) -> LLMDataDist:
    config = LLMConfig()
    config.enable_cache_manager = True
    if listen is not None:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def register(
    datadist: LLMDataDist, slots: int, keys: tuple[CacheKey, ...] = ()
) -> tuple[list[np.ndarray], Cache]:
    """Memory of our own (K and V of each layer), made known to the library."""
    tensors = [np.zeros((slots, SLOT), np.float32) for _ in range(2 * LAYERS)]
    desc = CacheDesc(2 * LAYERS, (slots, SLOT), DataType.DT_FLOAT)
    return tensors, datadist.cache_manager.register_cache(desc, [t.ctypes.data for t in tensors], keys)


def prefill(pipe: Connection) -> None:
    datadist = start(LLMRole.PROMPT, PREFILL, "127.0.0.1:0")
    # The i-th key stands for slot i.
    tensors, cache = register(datadist, 4, (CacheKey(PREFILL, req_id=70), CacheKey(PREFILL, req_id=71)))
    for i, tensor in enumerate(tensors):
        tensor[:] = 10 * i + np.arange(4)[:, None]  # slot s of tensor i holds 10 i + s
    pipe.send((datadist.listen_address, cache.cache_id))
    addresses = pipe.recv()  # decode has linked, and tells where its KV for slot 3 shall go
    computed = Computed()
    config = TransferConfig(DECODE, addresses, range(LAYERS), src_batch_index=3)
    task = datadist.cache_manager.transfer_cache_async(cache, computed, [config])
    for layer in range(LAYERS):
        for tensor in tensors[2 * layer : 2 * layer + 2]:
            tensor[3] += 0.5  # the layer is computed while the one before is on its way
        computed.layers[layer].set()
    print(f"prefill: pushed slot 3 layer by layer: {task.synchronize()}", flush=True)
    pipe.send("pushed")
    pipe.recv()  # decode needs nothing any more
    datadist.finalize()


def decode(pipe: Connection) -> None:
    (host, port), cache_id = pipe.recv()
    datadist = start(LLMRole.DECODER, DECODE)
    tensors, cache = register(datadist, 3)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, port)
    print(f"decode: linked: {datadist.link_clusters([peer], timeout=5000)[0]}", flush=True)

    manager = datadist.cache_manager
    manager.pull_cache(CacheKey(PREFILL, req_id=71), cache, batch_index=2)
    print(f"decode: request 71 pulled by key into slot 2: {[t[2, 0].item() for t in tensors]}", flush=True)
    manager.pull_cache(CacheKeyByIdAndIndex(PREFILL, cache_id, batch_index=0), cache, batch_index=0)
    print(f"decode: slot 0 pulled by cache id into slot 0: {[t[0, 0].item() for t in tensors]}", flush=True)

    pipe.send([tensor[1].ctypes.data for tensor in tensors])
    pipe.recv()  # prefill has pushed
    print(f"decode: slot 1, pushed by prefill: {[t[1, 0].item() for t in tensors]}", flush=True)
    expected = [[10 * i, 10 * i + 3.5, 10 * i + 1] for i in range(2 * LAYERS)]
    assert all((t == np.array(slots)[:, None]).all() for t, slots in zip(tensors, expected, strict=True))
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
