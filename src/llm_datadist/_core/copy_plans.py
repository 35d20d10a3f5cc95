"""Copies between caches of one process -> what to move, with every check of the contract.

``plan_*`` raise ParamInvalidError before a byte moves. A plan of blocks copies as if all reads came before
all writes: a block that is a source and a destination of one call is saved first, tensor group by group,
so that the buffer stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llm_datadist._core.layout import Layout, check_distinct, check_indices
from llm_datadist._core.overlap import overlaps
from llm_datadist._core.requests import CopyBlocks, CopyCache, SwapBlocks
from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist.enums import Placement
from llm_datadist.status import ParamInvalidError

TO_THE_END = -1


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One end of a copy: a registered or allocated cache, or blocks of a CPU cache. ``name``: for texts."""

    name: str
    layout: Layout
    addresses: U64
    is_blocks: bool
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Some tensors of a copy: ``saved`` goes to a buffer, then ``direct`` moves, then the buffer to ``restored``."""

    saved: Extents
    direct: Segments
    restored: Extents


def plan_copy_cache(request: CopyCache, src: Memory, dst: Memory) -> Segments:
    """Part of a slot to the same part of another slot.

    Raises:
        ParamInvalidError: Kinds, tensor counts, batch indices, offset or size break a rule.
    """
    for side, memory in (("dst", dst), ("src", src)):
        if memory.is_blocks:
            raise ParamInvalidError(
                f"{side} is {memory.name}, a blocks cache; copy_cache needs caches, use copy_blocks"
            )
    _check_tensors(src, dst)
    _check_batch("dst_batch_index", request.dst_batch_index, dst)
    _check_batch("src_batch_index", request.src_batch_index, src)
    nbytes = _checked_size(request, src, dst)
    source = _part_of_slot(src, request.src_batch_index, request.offset, nbytes)
    destination = _part_of_slot(dst, request.dst_batch_index, request.offset, nbytes)
    return Segments(source, _apart(source, destination, src, dst))


def plan_swap_blocks(request: SwapBlocks, src: Memory, dst: Memory) -> Segments:
    """Blocks of a host cache to blocks of a device cache, or the other way.

    Raises:
        ParamInvalidError: Kinds, placements, sizes or indices break a rule.
    """
    for side, memory in (("src", src), ("dst", dst)):
        if not memory.is_blocks:
            raise ParamInvalidError(f"{side} is {memory.name}, not a blocks cache; swap_blocks needs two")
    if {src.placement, dst.placement} != {Placement.HOST, Placement.DEVICE}:
        raise ParamInvalidError(
            f"src ({src.name}) has placement {src.placement.name} and dst ({dst.name}) {dst.placement.name}; "
            "swap_blocks moves between one HOST and one DEVICE cache"
        )
    _check_tensors(src, dst)
    if src.layout.stride_nbytes != dst.layout.stride_nbytes:
        raise ParamInvalidError(
            f"a block of {src.name} has {src.layout.stride_nbytes} bytes, one of {dst.name} "
            f"{dst.layout.stride_nbytes}; equal needed"
        )
    _check_blocks("src_to_dst", request.src_blocks, src, request.dst_blocks, dst)
    source, destination = _blocks(src, request.src_blocks), _blocks(dst, request.dst_blocks)
    return Segments(source, _apart(source, destination, src, dst))


def plan_copy_blocks(request: CopyBlocks, memory: Memory, buffer_nbytes: int) -> Iterator[Step]:
    """Blocks of a cache to other blocks of it. The checks come before the first step is given.

    Args:
        request: What is asked for.
        memory: The cache.
        buffer_nbytes: What a step may save, if that is enough for one tensor.

    Raises:
        ParamInvalidError: Not a blocks cache, an index out of range, or a destination named twice.
    """
    if not memory.is_blocks:
        raise ParamInvalidError(f"{memory.name} is not a blocks cache; copy_blocks needs one, use copy_cache")
    sources, destinations = request.src_blocks, request.dst_blocks
    check_indices("copy_block_info: source", request.named_blocks, memory.layout.dim0)
    _check_blocks("copy_block_info", sources, memory, destinations, memory)
    moved = sources != destinations
    sources, destinations = sources[moved], destinations[moved]
    overwritten = np.isin(sources, destinations)
    row_nbytes = max(1, int(overwritten.sum()) * memory.layout.stride_nbytes)
    tensors = max(1, buffer_nbytes // row_nbytes)
    return _steps(memory, sources, destinations, overwritten, tensors)


def copied_to(request: CopyBlocks, memory: Memory) -> Extents:
    """All that the steps of such a plan write."""
    moved = request.src_blocks != request.dst_blocks
    return _blocks(memory, request.dst_blocks[moved])


def _steps(
    memory: Memory, sources: U64, destinations: U64, overwritten: np.ndarray[tuple[int], np.dtype[np.bool_]],
    tensors: int,
) -> Iterator[Step]:  # fmt: skip
    for first in range(0, memory.layout.num_tensors if len(sources) else 0, tensors):
        bases = memory.addresses[first : first + tensors]

        def extents(blocks: U64, bases: U64 = bases) -> Extents:
            return _extents(bases, blocks, memory.layout.stride_nbytes)

        yield Step(
            saved=extents(sources[overwritten]),
            direct=Segments(extents(sources[~overwritten]), extents(destinations[~overwritten])),
            restored=extents(destinations[overwritten]),
        )


def _blocks(memory: Memory, blocks: U64) -> Extents:
    return _extents(memory.addresses, blocks, memory.layout.stride_nbytes)


def _extents(bases: U64, blocks: U64, stride_nbytes: int) -> Extents:
    stride = np.uint64(stride_nbytes)
    return Extents.of(bases, blocks * stride, np.full(len(blocks), stride))


def _part_of_slot(memory: Memory, batch: int, offset: int, nbytes: int) -> Extents:
    start = batch * memory.layout.stride_nbytes + offset
    return Extents.of(
        memory.addresses, np.array([start], dtype=np.uint64), np.array([nbytes], dtype=np.uint64)
    )


def _checked_size(request: CopyCache, src: Memory, dst: Memory) -> int:
    offset, size = request.offset, request.size
    fits = min(src.layout.stride_nbytes, dst.layout.stride_nbytes)
    sizes = f"a slot of {src.name} has {src.layout.stride_nbytes} bytes, one of {dst.name} {dst.layout.stride_nbytes}"
    if not 0 <= offset < fits:
        raise ParamInvalidError(f"offset is {offset}, but {sizes}; it must lie within both (0..{fits - 1})")
    nbytes = src.layout.stride_nbytes - offset if size == TO_THE_END else size
    if not 0 < nbytes <= fits - offset:
        raise ParamInvalidError(
            f"size is {size} at offset {offset}, but {sizes}; pass 1..{fits - offset}"
            + (", or -1 for the rest of the source slot" if src.layout.stride_nbytes <= fits else "")
        )
    return nbytes


def _check_tensors(src: Memory, dst: Memory) -> None:
    if src.layout.num_tensors != dst.layout.num_tensors:
        raise ParamInvalidError(
            f"{src.name} has {src.layout.num_tensors} tensors, {dst.name} {dst.layout.num_tensors}; equal needed"
        )


def _check_batch(name: str, batch: int, memory: Memory) -> None:
    slots = memory.layout.dim0
    if not 0 <= batch < slots:
        raise ParamInvalidError(f"{name} is {batch}, but {memory.name} has {slots} slots (0..{slots - 1})")


def _check_blocks(name: str, sources: U64, src: Memory, destinations: U64, dst: Memory) -> None:
    check_indices(f"{name}: source", sources, src.layout.dim0)
    check_indices(f"{name}: destination", destinations, dst.layout.dim0)
    check_distinct(f"{name}: destination", destinations, dst.layout.dim0)


def _apart(source: Extents, destination: Extents, src: Memory, dst: Memory) -> Extents:
    if overlaps(source, destination):
        raise ParamInvalidError(
            f"the destination in {dst.name} overlaps the source in {src.name}; they are the same memory"
        )
    return destination
