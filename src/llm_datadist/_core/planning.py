"""Layers x blocks or slots -> the slices that a transfer moves, with every check of the contract.

``check_*`` need the caller's side alone and run before any link is looked at; ``plan_*`` need both
layouts, so a pull calls them at the reader and a push at the destination, which knows its own registry.
Every one of them raises ParamInvalidError before a byte moves.
"""

from __future__ import annotations

import numpy as np

from llm_datadist._core.layout import CacheSlice, Layout, check_distinct, check_indices
from llm_datadist._core.requests import Layers, PullBlocks, PullCache, PushBlocks, PushCache
from llm_datadist._core.segments import U64
from llm_datadist.keys import BlocksCacheKey
from llm_datadist.status import ParamInvalidError

WHOLE_STRIDE = -1
MAX_TENSORS = (1 << 32) - 1  # num_tensors is uint32; no range of layers ends beyond it


# ---- layers ------------------------------------------------------------------------------------------


def check_layers(side: str, layers: range | None, per_layer: int, num_tensors: int) -> tuple[int, int] | None:
    """(first tensor, count) of a layer range; None for all tensors.

    Raises:
        ParamInvalidError: Step, start, end or divisibility is wrong.
    """
    if per_layer < 1:
        raise ParamInvalidError(f"tensor_num_per_layer is {per_layer}; it must be at least 1")
    if not layers:
        return None
    if layers.step != 1 or layers.start < 0:
        raise ParamInvalidError(f"{side}_layer_range is {layers}; it needs step 1 and a start >= 0")
    if num_tensors % per_layer:
        raise ParamInvalidError(
            f"{side}_layer_range is given, but the {num_tensors} tensors of the {side} cache are not a multiple of "
            f"tensor_num_per_layer={per_layer}; pass the number of tensors that one layer has"
        )
    if layers.stop * per_layer > num_tensors:
        raise ParamInvalidError(
            f"{side}_layer_range is {layers}, but the {side} cache has {num_tensors // per_layer} layers "
            f"({num_tensors} tensors, {per_layer} per layer)"
        )
    return layers.start * per_layer, len(layers) * per_layer


def match_tensors(
    layers: Layers, src_tensors: int, dst_tensors: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((first, count) at the source, (first, count) at the destination).

    Raises:
        ParamInvalidError: The two sides do not have the same number of tensors.
    """
    src = check_layers("src", layers.src, layers.tensors_per_layer, src_tensors)
    dst = check_layers("dst", layers.dst, layers.tensors_per_layer, dst_tensors)
    if (src or dst) and not (src and dst):
        other = "dst" if src else "src"
        # A range on one side only: N must divide the other side's tensors as well.
        check_layers(other, range(0, 1), layers.tensors_per_layer, src_tensors if dst else dst_tensors)
    src, dst = src or (0, src_tensors), dst or (0, dst_tensors)
    if src[1] != dst[1]:
        raise ParamInvalidError(
            f"{src[1]} tensors at the source against {dst[1]} at the destination (layer ranges {layers.src} and "
            f"{layers.dst}, tensor_num_per_layer={layers.tensors_per_layer}); both sides need the same number"
        )
    return src, dst


# ---- the caller's side ---------------------------------------------------------------------------------


def check_pull_cache(request: PullCache, dst: Layout, *, dst_is_blocks: bool) -> None:
    """What a pull_cache can know before it asks the peer."""
    if dst_is_blocks:
        raise ParamInvalidError(
            f"cache {request.cache.cache_id} is a blocks cache; pull_cache needs a cache, use pull_blocks"
        )
    _check_batch("batch_index", request.batch_index, dst.dim0)
    if request.size != WHOLE_STRIDE and not 0 < request.size <= dst.stride_nbytes:
        raise ParamInvalidError(
            f"size is {request.size}; it must be -1 (the whole slot) or 1..{dst.stride_nbytes}, the bytes of a slot of "
            f"cache {request.cache.cache_id}"
        )
    check_layers("dst", request.layers.dst, request.layers.tensors_per_layer, dst.num_tensors)
    check_range_of_peer("src", request.layers.src)


def check_pull_blocks(request: PullBlocks, dst: Layout, *, dst_is_blocks: bool) -> None:
    """What a pull_blocks can know before it asks the peer."""
    if not dst_is_blocks:
        raise ParamInvalidError(
            f"cache {request.cache.cache_id} is not a blocks cache; pull_blocks needs one, use pull_cache"
        )
    if not len(request.dst_blocks):
        raise ParamInvalidError("dst_blocks is empty; name at least one block to fill")
    if isinstance(request.key, BlocksCacheKey):
        _check_equal_lengths(request.src_blocks, request.dst_blocks)
    elif len(request.src_blocks):
        raise ParamInvalidError(
            f"src_blocks has {len(request.src_blocks)} entries, but {request.key!r} names a slot; "
            "leave it empty or pull by BlocksCacheKey"
        )
    check_indices("dst_blocks", request.dst_blocks, dst.dim0)
    check_distinct("dst_blocks", request.dst_blocks, dst.dim0)
    check_layers("dst", request.layers.dst, request.layers.tensors_per_layer, dst.num_tensors)
    check_range_of_peer("src", request.layers.src)


def check_push_cache(request: PushCache, src: Layout, *, src_is_blocks: bool) -> None:
    """What a push_cache can know before it asks the peer."""
    if src_is_blocks:
        raise ParamInvalidError(
            f"cache {request.cache.cache_id} is a blocks cache; push_cache needs a cache, use push_blocks"
        )
    if request.size != WHOLE_STRIDE:
        raise ParamInvalidError(f"size is {request.size}; push_cache moves whole slots, it must be -1")
    _check_batch("src_batch_index", request.src_batch_index, src.dim0)
    check_layers("src", request.layers.src, request.layers.tensors_per_layer, src.num_tensors)
    check_range_of_peer("dst", request.layers.dst)


def check_push_blocks(request: PushBlocks, src: Layout, *, src_is_blocks: bool) -> None:
    """What a push_blocks can know before it asks the peer."""
    if not src_is_blocks:
        raise ParamInvalidError(
            f"cache {request.cache.cache_id} is not a blocks cache; push_blocks needs one, use push_cache"
        )
    if not len(request.src_blocks) or not len(request.dst_blocks):
        raise ParamInvalidError("src_blocks or dst_blocks is empty; push_blocks needs both, of equal length")
    _check_equal_lengths(request.src_blocks, request.dst_blocks)
    check_indices("src_blocks", request.src_blocks, src.dim0)
    check_distinct("dst_blocks", request.dst_blocks, 1 << 64)
    check_layers("src", request.layers.src, request.layers.tensors_per_layer, src.num_tensors)
    check_range_of_peer("dst", request.layers.dst)


# ---- both sides ------------------------------------------------------------------------------------------


def plan_slot(
    src: Layout, src_batch: int, dst: Layout, dst_batch: int, size: int, layers: Layers
) -> tuple[CacheSlice, CacheSlice]:
    """pull_cache: bytes [0, size) of a source slot into a destination slot."""
    src_tensors, dst_tensors = match_tensors(layers, src.num_tensors, dst.num_tensors)
    nbytes = dst.stride_nbytes if size == WHOLE_STRIDE else size
    if nbytes > src.stride_nbytes:
        raise ParamInvalidError(
            f"{nbytes} bytes asked of a source slot of {src.stride_nbytes} bytes "
            f"(destination slot: {dst.stride_nbytes}); pass size <= {src.stride_nbytes}"
        )
    return (
        slot_slice("source", src_tensors, src, src_batch, nbytes),
        slot_slice("destination", dst_tensors, dst, dst_batch, nbytes),
    )


def plan_slot_push(
    src: Layout, src_batch: int, dst: Layout, dst_batch: int, layers: Layers
) -> tuple[CacheSlice, CacheSlice]:
    """push_cache, and a layer-wise task without blocks: a whole source slot into a destination slot."""
    src_tensors, dst_tensors = match_tensors(layers, src.num_tensors, dst.num_tensors)
    if src.stride_nbytes > dst.stride_nbytes:
        raise ParamInvalidError(
            f"the source slot has {src.stride_nbytes} bytes, the destination slot only {dst.stride_nbytes}"
        )
    nbytes = src.stride_nbytes
    return (
        slot_slice("source", src_tensors, src, src_batch, nbytes),
        slot_slice("destination", dst_tensors, dst, dst_batch, nbytes),
    )


def plan_blocks(
    src: Layout, src_blocks: U64, dst: Layout, dst_blocks: U64, layers: Layers
) -> tuple[CacheSlice, CacheSlice]:
    """Blocks to blocks, one to one."""
    src_tensors, dst_tensors = match_tensors(layers, src.num_tensors, dst.num_tensors)
    if src.stride_nbytes != dst.stride_nbytes:
        raise ParamInvalidError(
            f"a block has {src.stride_nbytes} bytes at the source, {dst.stride_nbytes} at the destination; equal needed"
        )
    _check_equal_lengths(src_blocks, dst_blocks)
    check_indices("src_blocks", src_blocks, src.dim0)
    check_indices("dst_blocks", dst_blocks, dst.dim0)
    check_distinct("dst_blocks", dst_blocks, dst.dim0)
    nbytes = len(src_blocks) * src.stride_nbytes
    return (
        CacheSlice(*src_tensors, src_blocks, src.stride_nbytes, nbytes),
        CacheSlice(*dst_tensors, dst_blocks, dst.stride_nbytes, nbytes),
    )


def plan_slot_to_blocks(
    src: Layout, src_batch: int, dst: Layout, dst_blocks: U64, layers: Layers
) -> tuple[CacheSlice, CacheSlice]:
    """A slot in pieces of the destination's block size: piece k into block ``dst_blocks[k]``."""
    src_tensors, dst_tensors = match_tensors(layers, src.num_tensors, dst.num_tensors)
    check_indices("dst_blocks", dst_blocks, dst.dim0)
    check_distinct("dst_blocks", dst_blocks, dst.dim0)
    nbytes = slot_pieces_nbytes(src.stride_nbytes, len(dst_blocks), dst.stride_nbytes)
    source = slot_slice("source", src_tensors, src, src_batch, nbytes)
    return source, CacheSlice(*dst_tensors, dst_blocks, dst.stride_nbytes, nbytes)


def slot_pieces_nbytes(slot_nbytes: int, pieces: int, piece_nbytes: int) -> int:
    """Bytes of a slot that ``pieces`` pieces take.

    Raises:
        ParamInvalidError: The last piece would begin at or beyond the end of the slot.
    """
    if pieces < 1 or piece_nbytes < 1:
        raise ParamInvalidError(
            f"{pieces} destination blocks of {piece_nbytes} bytes; at least one of one byte is needed"
        )
    if (pieces - 1) * piece_nbytes >= slot_nbytes:
        most = -(-slot_nbytes // piece_nbytes)
        raise ParamInvalidError(
            f"{pieces} destination blocks of {piece_nbytes} bytes for a slot of {slot_nbytes} bytes; at most {most} fit"
        )
    return min(slot_nbytes, pieces * piece_nbytes)


def slot_slice(side: str, tensors: tuple[int, int], layout: Layout, batch: int, nbytes: int) -> CacheSlice:
    """Bytes [0, nbytes) of one slot: a single unit of the stride, cut.

    Raises:
        ParamInvalidError: There is no such slot.
    """
    _check_batch(f"the {side}'s batch index", batch, layout.dim0)
    return CacheSlice(*tensors, np.array([batch], dtype=np.uint64), layout.stride_nbytes, nbytes)


def _check_batch(name: str, batch: int, dim0: int) -> None:
    if not 0 <= batch < dim0:
        raise ParamInvalidError(f"{name} is {batch}, but that cache has {dim0} slots (0..{dim0 - 1})")


def _check_equal_lengths(src_blocks: U64, dst_blocks: U64) -> None:
    if not len(dst_blocks):
        raise ParamInvalidError("dst_blocks is empty; name at least one block to fill")
    if len(src_blocks) != len(dst_blocks):
        raise ParamInvalidError(
            f"src_blocks has {len(src_blocks)} entries and dst_blocks {len(dst_blocks)}; they correspond one to one"
        )


def check_range_of_peer(side: str, layers: range | None) -> None:
    """What can be said of a range of the peer's layers without knowing how many it has."""
    if layers and (layers.step != 1 or layers.start < 0 or layers.stop > MAX_TENSORS):
        raise ParamInvalidError(
            f"{side}_layer_range is {layers}; it needs step 1, a start >= 0 and at most {MAX_TENSORS} layers"
        )
