"""Address ranges, and which of them a side of a plan lies in: a few ranges, any number of tensors.

Strategy: a tensor is taken as what lies between its first and its last byte that is used; that must be
within one range. As a rule all tensors are in the same one: nothing per block but a minimum and a maximum.
Threads: immutable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llm_datadist._core.segments import U64, Extents

_TOP = 1 << 64


class Areas:
    """Disjoint ranges (address, nbytes, shift): what is at ``address`` for others is at ``address + shift`` here."""

    __slots__ = ("_ends", "_ends_array", "_shifts", "_shifts_array", "_starts", "_starts_array")

    def __init__(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        rows = sorted(ranges)
        self._starts = [address for address, _, _ in rows]
        self._ends = [address + nbytes for address, nbytes, _ in rows]
        self._shifts = [shift for _, _, shift in rows]
        self._starts_array = np.array(self._starts, dtype=np.uint64)
        self._ends_array = np.array(self._ends, dtype=np.uint64)
        # Negative shifts are added modulo 2**64.
        self._shifts_array = np.array([shift % _TOP for shift in self._shifts], dtype=np.uint64)

    def shift_at(self, address: int, nbytes: int) -> int | None:
        """Of the range that holds all of [address, address + nbytes); None if none does."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address + nbytes > self._ends[at]:
            return None
        return self._shifts[at]

    def shifts_of(self, extents: Extents, box: Box) -> U64 | None:
        """The same for each tensor, to be added to its base; None if one of them is in no range."""
        shift = self.shift_at(box.low, box.high - box.low)
        if shift is not None:
            return np.array([shift % _TOP], dtype=np.uint64)
        if not self._starts or box.high > _TOP:
            return None
        starts = extents.bases + np.uint64(box.offset)
        at = self._starts_array.searchsorted(starts, side="right").astype(np.int64) - 1
        room = self._ends_array[at] - starts  # of a start beyond its range: wraps to a huge number, or is 0
        inside = (at >= 0) & (starts < self._ends_array[at]) & (room >= np.uint64(box.width))
        return self._shifts_array[at] if inside.all() else None


@dataclass(frozen=True, slots=True)
class Box:
    """What the used bytes of some tensors lie in.

    Attributes:
        low: The first byte of all.
        high: Behind the last byte; more than 2**64 where numbers do not fit into an address space.
        offset: Where the first used byte lies within a tensor.
        width: From there to behind its last used byte.
    """

    low: int
    high: int
    offset: int
    width: int

    @classmethod
    def of(cls, extents: Extents) -> Box:
        """Of at least one byte."""
        if len(extents.offsets) == 1:
            offset, end = int(extents.offsets[0]), int(extents.offsets[0]) + int(extents.lengths[0])
        else:
            ends = extents.offsets + extents.lengths
            offset, end = int(extents.offsets.min()), int(ends.max())
            if (ends < extents.offsets).any():
                end += _TOP
        first = last = int(extents.bases[0])
        if len(extents.bases) > 1:
            first, last = int(extents.bases.min()), int(extents.bases.max())
        return cls(first + offset, last + end, offset, end - offset)
