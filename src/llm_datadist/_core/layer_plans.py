"""Plans of layer-wise pushes: which rules apply to blocks, slots, keys and raw addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_datadist._core.layout import CacheSlice, Layout, check_distinct, check_indices
from llm_datadist._core.planning import (
    check_layers,
    check_range_of_peer,
    plan_blocks,
    plan_slot_push,
    plan_slot_to_blocks,
    slot_pieces_nbytes,
    slot_slice,
)
from llm_datadist._core.requests import Layers, PushLayers
from llm_datadist._core.segments import U64
from llm_datadist.enums import Placement
from llm_datadist.layerwise import TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import ParamInvalidError

TENSORS_PER_LAYER = 2
_NO_INDICES = np.empty(0, dtype=np.uint64)
_ONE_UNIT = np.zeros(1, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class LayerBlocks:
    """The block side of a layer-wise push: both lists, or only destinations, or none.

    ``unit_nbytes``: bytes between two destination blocks; 0 = the source's block bytes.
    """

    src: U64
    dst: U64
    unit_nbytes: int


def check_push_layers(request: PushLayers, src: Layout) -> LayerBlocks:
    """What a layer-wise task can know before it asks a peer.

    Raises:
        ParamInvalidError: A rule of the caller's side is broken.
    """
    if request.cache.cache_desc.placement == Placement.HOST:
        raise ParamInvalidError(
            "src_cache has placement HOST; transfer_cache_async needs one with placement DEVICE"
        )
    if src.num_tensors % TENSORS_PER_LAYER:
        raise ParamInvalidError(
            f"src_cache has {src.num_tensors} tensors; a layer-wise push needs two per layer, an even number"
        )
    configs: Sequence[TransferConfig | TransferWithCacheKeyConfig] = request.configs
    for at, config in enumerate(configs):
        _check_config(f"transfer_configs[{at}]", config, src)
        if source_slot(config, request.cache.is_blocks_cache) >= src.dim0:
            raise ParamInvalidError(
                f"transfer_configs[{at}].src_batch_index is {config.src_batch_index}; src_cache has {src.dim0} slots"
            )
    return _check_blocks(request, src)


def source_slot(config: TransferConfig | TransferWithCacheKeyConfig, is_blocks: bool) -> int:
    """The source slot of a config without block lists: block 0 of a blocks cache."""
    return 0 if is_blocks else config.src_batch_index


def _check_config(name: str, config: TransferConfig | TransferWithCacheKeyConfig, src: Layout) -> None:
    layers = config.src_layer_range
    span = check_layers("src", layers, TENSORS_PER_LAYER, src.num_tensors) or (0, src.num_tensors)
    if isinstance(config, TransferConfig):
        if len(config.dst_addrs) != span[1]:
            raise ParamInvalidError(
                f"{name}.dst_addrs has {len(config.dst_addrs)} addresses for {span[1] // TENSORS_PER_LAYER} layers; "
                f"it needs {TENSORS_PER_LAYER} per layer"
            )
        return
    check_range_of_peer(f"{name}.dst", config.dst_layer_range)
    if not layers or len(layers) != len(config.dst_layer_range):
        raise ParamInvalidError(
            f"{name} has src_layer_range {layers} and dst_layer_range {config.dst_layer_range}; both are needed, "
            "of equal length"
        )


def _check_blocks(request: PushLayers, src: Layout) -> LayerBlocks:
    src_blocks = request.src_blocks if request.src_blocks is not None else _NO_INDICES
    dst_blocks = request.dst_blocks if request.dst_blocks is not None else _NO_INDICES
    unit = request.dst_block_nbytes or 0
    if unit < 0:
        raise ParamInvalidError(f"dst_block_memory_size is {unit}; it must not be negative")
    if len(src_blocks) and len(src_blocks) != len(dst_blocks):
        raise ParamInvalidError(
            f"src_block_indices has {len(src_blocks)} entries, dst_block_indices {len(dst_blocks)}; equal needed"
        )
    if not len(dst_blocks) and unit:
        raise ParamInvalidError(
            f"dst_block_memory_size is {unit}, but there are no dst_block_indices; leave it None or 0"
        )
    if len(src_blocks):
        check_indices("src_block_indices", src_blocks, src.dim0)
        if unit not in (0, src.stride_nbytes):
            raise ParamInvalidError(
                f"dst_block_memory_size is {unit}, but a block of src_cache has {src.stride_nbytes} bytes; equal needed"
            )
    elif len(dst_blocks):
        if not unit:
            raise ParamInvalidError(
                "dst_block_memory_size is needed (> 0) when dst_block_indices come without src_block_indices"
            )
        slot_pieces_nbytes(src.stride_nbytes, len(dst_blocks), unit)
    check_distinct("dst_block_indices", dst_blocks, 1 << 64)
    return LayerBlocks(src_blocks, dst_blocks, unit)


def plan_layers_by_key(
    src: Layout,
    src_batch: int,
    dst: Layout,
    dst_batch: int,
    *,
    dst_is_blocks: bool,
    blocks: LayerBlocks,
    layers: Layers,
) -> tuple[CacheSlice, CacheSlice]:
    """A layer-wise push into a cache of the destination's registry."""
    if not len(blocks.dst):
        if dst_is_blocks:
            raise ParamInvalidError("the destination is a blocks cache; pass dst_block_indices")
        return plan_slot_push(src, src_batch, dst, dst_batch, layers)
    if not dst_is_blocks:
        raise ParamInvalidError("dst_block_indices are given, but the destination is not a blocks cache")
    if blocks.unit_nbytes not in (0, dst.stride_nbytes):
        raise ParamInvalidError(
            f"dst_block_memory_size is {blocks.unit_nbytes}, but a destination block has {dst.stride_nbytes} bytes"
        )
    if len(blocks.src):
        return plan_blocks(src, blocks.src, dst, blocks.dst, layers)
    return plan_slot_to_blocks(src, src_batch, dst, blocks.dst, layers)


def plan_layers_by_address(
    src: Layout, src_batch: int, dst_count: int, blocks: LayerBlocks, layers: Layers
) -> tuple[CacheSlice, CacheSlice]:
    """A layer-wise push to raw addresses: ``dst_count`` tensors, blocks ``unit_nbytes`` apart."""
    span = check_layers("src", layers.src, TENSORS_PER_LAYER, src.num_tensors) or (0, src.num_tensors)
    if span[1] != dst_count:
        raise ParamInvalidError(
            f"{dst_count} destination addresses for {span[1]} tensors; there must be one for each"
        )
    if len(blocks.src):
        return _blocks_by_address(src, span, dst_count, blocks)
    nbytes, target = _slot_by_address(src, dst_count, blocks)
    return slot_slice("source", span, src, src_batch, nbytes), target


def _blocks_by_address(
    src: Layout, span: tuple[int, int], dst_count: int, blocks: LayerBlocks
) -> tuple[CacheSlice, CacheSlice]:
    """Source blocks one to one into units of their own size."""
    stride = src.stride_nbytes
    if len(blocks.src) != len(blocks.dst) or blocks.unit_nbytes not in (0, stride):
        raise ParamInvalidError(
            f"{len(blocks.src)} source blocks of {stride} bytes for {len(blocks.dst)} destination blocks of "
            f"{blocks.unit_nbytes or stride} bytes; number and size must be equal"
        )
    check_indices("src_block_indices", blocks.src, src.dim0)
    check_distinct("dst_block_indices", blocks.dst, 1 << 64)
    nbytes = len(blocks.src) * stride
    return CacheSlice(*span, blocks.src, stride, nbytes), CacheSlice(0, dst_count, blocks.dst, stride, nbytes)


def _slot_by_address(src: Layout, dst_count: int, blocks: LayerBlocks) -> tuple[int, CacheSlice]:
    """Where a slot goes, in pieces or whole, and how much of it."""
    if not len(blocks.dst):
        if blocks.unit_nbytes:
            raise ParamInvalidError(
                f"dst_block_memory_size is {blocks.unit_nbytes} without dst_block_indices; leave it 0"
            )
        return src.stride_nbytes, CacheSlice(0, dst_count, _ONE_UNIT, src.stride_nbytes, src.stride_nbytes)
    nbytes = slot_pieces_nbytes(src.stride_nbytes, len(blocks.dst), blocks.unit_nbytes)
    check_distinct("dst_block_indices", blocks.dst, 1 << 64)
    return nbytes, CacheSlice(0, dst_count, blocks.dst, blocks.unit_nbytes, nbytes)


def written_units(bases: U64, part: CacheSlice) -> tuple[U64, U64]:
    """Offsets and lengths of the units that a slice at raw addresses writes from each of ``bases``.

    Raises:
        ParamInvalidError: One would end beyond the address space.
    """
    top = (int(part.indices.max()) + 1) * part.unit_nbytes
    if int(bases.max()) + top > (1 << 64) - 1:
        raise ParamInvalidError(
            f"a destination block ends {top} bytes after {int(bases.max()):#x}, beyond the address space"
        )
    lengths = np.full(len(part.indices), part.unit_nbytes, dtype=np.uint64)
    lengths[-1] = part.row_nbytes - (len(lengths) - 1) * part.unit_nbytes
    return part.indices * np.uint64(part.unit_nbytes), lengths
