"""What goes wrong in real life, and what to do then: a key that is not there yet, a peer that hangs.

Two processes: prefill (cluster 1) owns the KV, decode (cluster 2) pulls it.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from llm_datadist import (
    CacheDesc,
    CacheKey,
    CacheNotExistError,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    TransferTimeoutError,
)

PREFILL, DECODE = 1, 2
DESC = CacheDesc(2, (1, 1000), DataType.DT_FLOAT)


def start(role: LLMRole, cluster_id: int, listen: str | None = None) -> LLMDataDist:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.sync_kv_timeout = 500  # ms that one pull may take
    if listen is not None:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def prefill(pipe: Connection) -> None:
    datadist = start(LLMRole.PROMPT, PREFILL, "127.0.0.1:0")
    tensors = [np.full((1, 1000), value, np.float32) for value in (1, 2)]
    pipe.send((os.getpid(), datadist.listen_address))
    pipe.recv()  # decode has asked too early
    addresses = [tensor.ctypes.data for tensor in tensors]
    datadist.cache_manager.register_cache(DESC, addresses, [CacheKey(PREFILL, req_id=7)])
    pipe.send("registered")
    pipe.recv()  # decode needs nothing any more
    datadist.finalize()


def decode(pipe: Connection) -> None:
    prefill_pid, (host, port) = pipe.recv()
    datadist = start(LLMRole.DECODER, DECODE)
    tensors = [np.zeros((1, 1000), np.float32) for _ in range(2)]
    cache = datadist.cache_manager.register_cache(DESC, [tensor.ctypes.data for tensor in tensors])
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, port)
    key = CacheKey(PREFILL, req_id=7)

    try:
        datadist.cache_manager.pull_cache(key, cache)
    except LLMException as error:  # any failure; its code says which
        print(f"not linked: {error.status_code}: {error}", flush=True)
    datadist.link_clusters([peer], timeout=5000)

    # The key is not there: nothing was written, and a retry works once it is.
    try:
        datadist.cache_manager.pull_cache(key, cache)
    except CacheNotExistError as error:
        print(f"missing key: {error.status_code}: {error}", flush=True)
    pipe.send("asked")
    pipe.recv()  # registered now
    datadist.cache_manager.pull_cache(key, cache)
    print(f"retry: {[tensor[0, 0].item() for tensor in tensors]}", flush=True)

    # The peer hangs: the call ends in time, and nothing is written after it.
    os.kill(prefill_pid, signal.SIGSTOP)
    try:
        while True:  # until the signal has arrived
            datadist.cache_manager.pull_cache(key, cache)
    except TransferTimeoutError as error:
        print(f"time-out: {error.status_code}: {error}", flush=True)
    finally:
        os.kill(prefill_pid, signal.SIGCONT)

    # Start afresh with that peer.
    for tensor in tensors:
        tensor[:] = 0
    print(f"unlink: {datadist.unlink_clusters([peer], timeout=5000)[0]}", flush=True)
    print(f"link: {datadist.link_clusters([peer], timeout=5000)[0]}", flush=True)
    datadist.cache_manager.pull_cache(key, cache)
    print(f"after re-linking: {[tensor[0, 0].item() for tensor in tensors]}", flush=True)
    assert all((tensor == value).all() for tensor, value in zip(tensors, (1, 2), strict=True))
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
