"""From the arguments of a transfer to the frozen request that the engine understands.

Types and ranges are checked here, in the order of the arguments; what needs to know a cache or a peer is the
engine's to check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from llm_datadist._core.indices import as_indices
from llm_datadist._core.notices import Notice, checked_notice
from llm_datadist._core.requests import Layers, PullBlocks, PullCache, PushBlocks, PushCache, PushLayers
from llm_datadist._core.segments import U64
from llm_datadist.caches import Cache
from llm_datadist.checks import check_int64, check_isinstance, check_uint32
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import ParamInvalidError

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine

T = TypeVar("T")


def pull_cache_request(
    engine: Engine, key: Any, cache: Any, batch_index: Any, size: Any, layers: Layers, notify: Any
) -> PullCache:
    """What ``pull_cache`` asks for."""
    check_isinstance("cache_key", key, (CacheKey, CacheKeyByIdAndIndex))
    if engine.accessible and isinstance(key, CacheKey):
        raise TypeError(
            "cache_key must be CacheKeyByIdAndIndex when enable_remote_cache_accessible is set, "
            f"not CacheKey ({key!r})"
        )
    return PullCache(
        key=key,
        cache=check_isinstance("cache", cache, Cache),
        batch_index=check_uint32("batch_index", batch_index),
        size=check_int64("size", size),
        layers=layers,
        notice=_notice(notify),
    )


def pull_blocks_request(
    key: Any, cache: Any, src_blocks: Any, dst_blocks: Any, layers: Layers, notify: Any
) -> PullBlocks:
    """What ``pull_blocks`` asks for."""
    return PullBlocks(
        key=check_isinstance("src_cache_key", key, (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)),
        cache=check_isinstance("dst_cache", cache, Cache),
        src_blocks=as_indices("src_blocks", src_blocks),
        dst_blocks=as_indices("dst_blocks", dst_blocks),
        layers=layers,
        notice=_notice(notify),
    )


def push_cache_request(
    key: Any, cache: Any, src_batch_index: Any, size: Any, layers: Layers, notify: Any
) -> PushCache:
    """What ``push_cache`` asks for."""
    return PushCache(
        key=check_isinstance("dst_cache_key", key, CacheKeyByIdAndIndex),
        cache=check_isinstance("src_cache", cache, Cache),
        src_batch_index=check_uint32("src_batch_index", src_batch_index),
        size=check_int64("size", size),
        layers=layers,
        notice=_notice(notify),
    )


def push_blocks_request(
    key: Any, cache: Any, src_blocks: Any, dst_blocks: Any, layers: Layers, notify: Any
) -> PushBlocks:
    """What ``push_blocks`` asks for."""
    return PushBlocks(
        key=check_isinstance("dst_cache_key", key, BlocksCacheKey),
        cache=check_isinstance("src_cache", cache, Cache),
        src_blocks=as_indices("src_blocks", src_blocks),
        dst_blocks=as_indices("dst_blocks", dst_blocks),
        layers=layers,
        notice=_notice(notify),
    )


def push_layers_request(
    engine: Engine, cache: Any, synchronizer: Any, configs: Any, src: Any, dst: Any, dst_block_nbytes: Any
) -> PushLayers:
    """What ``transfer_cache_async`` asks for."""
    kind: type[Any] = TransferWithCacheKeyConfig if engine.accessible else TransferConfig
    request = PushLayers(
        cache=check_isinstance("src_cache", cache, Cache),
        synchronizer=check_isinstance("layer_synchronizer", synchronizer, LayerSynchronizer),
        configs=tuple(_copy(config) for config in entries_of("transfer_configs", configs, kind)),
        src_blocks=_optional_indices("src_block_indices", src),
        dst_blocks=_optional_indices("dst_block_indices", dst),
        dst_block_nbytes=_checked_block_nbytes(dst_block_nbytes),
    )
    if not request.configs:
        raise ParamInvalidError("transfer_configs is empty; name at least one destination")
    return request


def layers_of(src: Any, dst: Any, tensors_per_layer: Any) -> Layers:
    """The layer ranges of a transfer."""
    return Layers(
        src=check_isinstance("src_layer_range", src, range, True),
        dst=check_isinstance("dst_layer_range", dst, range, True),
        tensors_per_layer=check_uint32("tensor_num_per_layer", tensors_per_layer),
    )


def entries_of(name: str, entries: Any, kind: type[T]) -> tuple[T, ...]:
    """A list or tuple of one kind, as a tuple."""
    check_isinstance(name, entries, (list, tuple))
    return tuple([check_isinstance(f"{name}[{i}]", entry, kind) for i, entry in enumerate(entries)])


def _notice(notify: Any) -> Notice | None:
    if notify is None:
        return None
    check_isinstance("notify", notify, (tuple, list), True)
    if len(notify) != 2:
        raise TypeError(f"notify must be (name, message), not {len(notify)} entries ({notify!r:.200})")
    return checked_notice("notify[0]", notify[0], "notify[1]", notify[1])


def _copy(config: TransferConfig | TransferWithCacheKeyConfig) -> Any:
    """A copy that the caller cannot change; checks again what may have been edited in place."""
    if isinstance(config, TransferConfig):
        return TransferConfig(
            config.dst_cluster_id, config.dst_addrs, config.src_layer_range, config.src_batch_index
        )
    return TransferWithCacheKeyConfig(
        config.cache_key, config.src_layer_range, config.dst_layer_range, config.src_batch_index
    )


def _optional_indices(name: str, blocks: Any) -> U64 | None:
    return None if blocks is None else as_indices(name, blocks)


def _checked_block_nbytes(size: Any) -> int | None:
    if size is None:
        return None
    nbytes = check_int64("dst_block_memory_size", size)
    if nbytes < 0:
        raise ParamInvalidError(f"dst_block_memory_size is {nbytes}; it must not be negative")
    return nbytes
