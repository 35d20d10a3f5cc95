"""What a caller asked for, as frozen values: built by the facade, understood by everything below.

``notice``: what the peer is told once the data is complete.
"""

from __future__ import annotations

import msgspec

from llm_datadist._core.notices import Notice
from llm_datadist._core.segments import U64
from llm_datadist.caches import Cache
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig


class Layers(msgspec.Struct, frozen=True):
    """Layer ranges of a request; None or an empty range means all tensors of that side."""

    src: range | None = None
    dst: range | None = None
    tensors_per_layer: int = 2


class PullCache(msgspec.Struct, frozen=True):
    """Bytes [0, size) of a slot of the peer into slot ``batch_index`` of ``cache``; size -1 = my stride."""

    key: CacheKey | CacheKeyByIdAndIndex
    cache: Cache
    batch_index: int
    size: int
    layers: Layers
    notice: Notice | None = None


class PullBlocks(msgspec.Struct, frozen=True):
    """Blocks (or, with a key of a slot and no src blocks, the slot in block pieces) into blocks of ``cache``."""

    key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex
    cache: Cache
    src_blocks: U64
    dst_blocks: U64
    layers: Layers
    notice: Notice | None = None


class PushCache(msgspec.Struct, frozen=True):
    """Slot ``src_batch_index`` of ``cache`` into a slot of the peer."""

    key: CacheKeyByIdAndIndex
    cache: Cache
    src_batch_index: int
    size: int
    layers: Layers
    notice: Notice | None = None


class PushBlocks(msgspec.Struct, frozen=True):
    """Blocks of ``cache`` into blocks of the peer."""

    key: BlocksCacheKey
    cache: Cache
    src_blocks: U64
    dst_blocks: U64
    layers: Layers
    notice: Notice | None = None


class PushLayers(msgspec.Struct, frozen=True):
    """A layer-wise task. ``configs`` are copies: the caller's objects may change meanwhile.

    ``dst_block_nbytes``: dst_block_memory_size; None and 0 as the caller gave them.
    """

    cache: Cache
    synchronizer: LayerSynchronizer
    configs: tuple[TransferConfig, ...] | tuple[TransferWithCacheKeyConfig, ...]
    src_blocks: U64 | None
    dst_blocks: U64 | None
    dst_block_nbytes: int | None


class CopyCache(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + size) of a slot of ``src`` to the same place in a slot of ``dst``; size -1 = the rest."""

    dst: Cache
    src: Cache
    dst_batch_index: int
    src_batch_index: int
    offset: int
    size: int


class CopyBlocks(msgspec.Struct, frozen=True):
    """Within ``cache`` block ``src_blocks[i]`` to ``dst_blocks[i]``, as if all were read before any is written.

    ``named_blocks``: every source block of the call, those without a destination included.
    """

    cache: Cache
    named_blocks: U64
    src_blocks: U64
    dst_blocks: U64


class SwapBlocks(msgspec.Struct, frozen=True):
    """Block ``src_blocks[i]`` of ``src`` to ``dst_blocks[i]`` of ``dst``."""

    src: Cache
    dst: Cache
    src_blocks: U64
    dst_blocks: U64
