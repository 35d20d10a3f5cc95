"""Where the bytes of a cache lie: CacheDesc -> Layout, and the part of a cache that a transfer touches."""

from __future__ import annotations

import msgspec
import numpy as np

from llm_datadist._core.segments import U64, Extents
from llm_datadist.caches import CacheDesc
from llm_datadist.status import ParamInvalidError


class Layout(msgspec.Struct, frozen=True):
    """Sizes of a cache: ``dim0`` slots or blocks of ``stride_nbytes`` in each of ``num_tensors`` tensors."""

    num_tensors: int
    dim0: int
    stride_nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of one tensor."""
        return self.dim0 * self.stride_nbytes

    @classmethod
    def of(cls, desc: CacheDesc) -> Layout:
        """The layout of a description.

        Raises:
            ParamInvalidError: The shape has a dim <= 0 or is larger than int64.
        """
        desc.check_shape()
        shape = desc.shape
        return cls(desc.num_tensors, shape[0], desc.size // shape[0])


class CacheSlice(msgspec.Struct, frozen=True, eq=False):
    """A part of a cache, in stream order: of each of some tensors the units at ``indices``.

    Unit i lies at ``indices[i] * unit_nbytes``; all are whole but the last, which is cut so that a tensor
    gives ``row_nbytes``.
    """

    first_tensor: int
    tensor_count: int
    indices: U64
    unit_nbytes: int
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole part."""
        return self.tensor_count * self.row_nbytes

    def extents(self, bases: U64) -> Extents:
        """The part as memory; ``bases`` are the addresses of all tensors of the cache."""
        chosen = bases[self.first_tensor : self.first_tensor + self.tensor_count]
        if len(self.indices) == 1:  # the latency of a single block counts, and there is nothing to merge
            pair = np.array((self.indices.item() * self.unit_nbytes, self.row_nbytes), dtype=np.uint64)
            row = pair[1:]
            return Extents(chosen, pair[:1], row, row, self.row_nbytes)
        offsets = self.indices * np.uint64(self.unit_nbytes)
        lengths = np.full(len(offsets), self.unit_nbytes, dtype=np.uint64)
        if len(lengths):
            lengths[-1] = self.row_nbytes - (len(lengths) - 1) * self.unit_nbytes
        return Extents.of(chosen, offsets, lengths)

    def tensors(self, first: int, count: int) -> CacheSlice:
        """The same units of ``count`` of its tensors, counted from its own first one."""
        return CacheSlice(self.first_tensor + first, count, self.indices, self.unit_nbytes, self.row_nbytes)


def check_slice(part: CacheSlice, layout: Layout, *, unit_nbytes: int) -> None:
    """Holds a part that a peer named against the cache it is of.

    Raises:
        ParamInvalidError: It does not lie wholly within the cache.
    """
    stop = part.first_tensor + part.tensor_count
    if part.first_tensor < 0 or part.tensor_count <= 0 or stop > layout.num_tensors:
        raise ParamInvalidError(
            f"tensors [{part.first_tensor}, {stop}) are not within the {layout.num_tensors} of the cache"
        )
    if part.unit_nbytes != unit_nbytes:
        raise ParamInvalidError(
            f"unit of {part.unit_nbytes} bytes asked of a cache whose stride is {unit_nbytes} bytes"
        )
    whole = len(part.indices) * part.unit_nbytes
    if not whole - part.unit_nbytes < part.row_nbytes <= whole:
        raise ParamInvalidError(
            f"{part.row_nbytes} bytes a tensor do not fit {len(part.indices)} units of {part.unit_nbytes}"
        )
    check_indices("index", part.indices, layout.dim0)


def check_indices(name: str, indices: U64, limit: int) -> None:
    """Every index, not only the first of a run.

    Raises:
        ParamInvalidError: One is ``limit`` or more; the text names the first bad one.
    """
    if len(indices) == 1 and indices.item() < limit:  # the latency of a single block counts
        return
    if len(indices) and int(indices.max()) >= limit:
        at = int(np.argmax(indices >= np.uint64(limit)))
        raise ParamInvalidError(
            f"{name}[{at}] is {indices[at]}, but that cache has {limit} in dim 0 (0..{limit - 1})"
        )


def check_distinct(name: str, indices: U64, limit: int) -> None:
    """No destination is named twice. All must be below ``limit``.

    Raises:
        ParamInvalidError: One is; the text names it.
    """
    if len(indices) < 2:
        return
    if limit <= 64 * len(indices) + 4096:
        counts = np.bincount(indices.astype(np.int64), minlength=1)
        if int(counts.max()) < 2:
            return
        twice = int(counts.argmax())
    else:
        ordered = np.sort(indices)
        same = ordered[1:] == ordered[:-1]
        if not same.any():
            return
        twice = int(ordered[int(same.argmax())])
    raise ParamInvalidError(
        f"{name} names block {twice} more than once; each destination block may be written once per call"
    )
