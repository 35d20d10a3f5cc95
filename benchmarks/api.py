"""The same workload through the public interface: ``pull_blocks`` between two initialised engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

if TYPE_CHECKING:
    from benchmarks.subject import Subject

_OWNER_ID, _READER_ID = 1, 2


def engine(cluster_id: int, backend: str, accessible: bool, listen: bool) -> LLMDataDist:
    """An initialised engine; several may live in one process."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = accessible
    config.transfer_backend = backend
    config.sync_kv_timeout = 120_000
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    options = {**config.generate_options(), "llm.AllowMultipleInstances": "1"}
    datadist = LLMDataDist(LLMRole.PROMPT if listen else LLMRole.DECODER, cluster_id)
    datadist.init(options)
    return datadist


def blocks_desc(tensors: int, blocks: int, block_nbytes: int) -> CacheDesc:
    """A paged cache of this many tensors."""
    return CacheDesc(tensors, [blocks, block_nbytes], DataType.DT_UINT8, Placement.DEVICE)


def serve(
    addresses: Sequence[int], blocks: int, block_nbytes: int, backend: str, accessible: bool
) -> LLMDataDist:
    """The owner's side: registers the memory and listens."""
    owner = engine(_OWNER_ID, backend, accessible, listen=True)
    desc = blocks_desc(len(addresses), blocks, block_nbytes)
    owner.cache_manager.register_blocks_cache(desc, list(addresses), BlocksCacheKey(_OWNER_ID, 0))
    return owner


def pull_blocks(
    subject: Subject, backend: str, accessible: bool
) -> tuple[Callable[[], object], Callable[[], None]]:
    """One pull over ``backend``, and how to end the engine."""
    host, port = subject.owner.call(
        "serve_engine",
        addresses=subject.source_bases.tolist(),
        blocks=subject.blocks,
        block_nbytes=subject.block_nbytes,
        backend=backend,
        accessible=accessible,
    )
    reader = engine(_READER_ID, backend, accessible, listen=False)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = _OWNER_ID
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, port)
    overall, _ = reader.link_clusters([peer], 5000)
    if overall != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"cannot link over {backend}: {overall}")
    addresses = subject.destination.bases.tolist()
    desc = blocks_desc(len(addresses), subject.blocks, subject.block_nbytes)
    cache = reader.cache_manager.register_blocks_cache(desc, addresses)
    key = BlocksCacheKey(_OWNER_ID, 0)
    source, destination = subject.source_blocks.tolist(), subject.destination_blocks.tolist()
    pull = reader.cache_manager.pull_blocks
    return lambda: pull(key, cache, source, destination), reader.finalize
