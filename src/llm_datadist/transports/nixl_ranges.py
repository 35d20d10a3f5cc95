"""Ranges of addresses, and which of them hold what (pure).

NIXL finds the registration of a piece by its start alone: the last range that starts at or before it must
hold all of it. So an agent may know the same range twice, but no two ranges that merely overlap
(``Ranges.clash``), and a piece must lie within one range, not in two that touch.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import U64, Extents


class Ranges:
    """Some ranges. Immutable.

    Attributes:
        pairs: (n, 2) uint64 rows of (start, end), sorted.
    """

    __slots__ = ("_best", "_reach", "_starts", "pairs")

    def __init__(self, pairs: U64) -> None:
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        self.pairs = pairs
        self._starts = np.ascontiguousarray(pairs[:, 0])
        ends = pairs[:, 1]
        self._reach = np.maximum.accumulate(ends) if len(ends) else ends
        # For each row: which row, up to it, comes furthest; the first of several, which is the widest.
        further = np.concatenate((ends[:1] > 0, self._reach[1:] > self._reach[:-1]))
        self._best = np.maximum.accumulate(np.where(further, np.arange(len(ends)), 0))

    def find(self, wanted: U64) -> NDArray[np.int64]:
        """For each range (start, end) a row that holds all of it, or -1."""
        if not len(self._starts):
            return np.full(len(wanted), -1, dtype=np.int64)
        at = self._starts.searchsorted(wanted[:, 0], side="right") - 1
        held = (at >= 0) & (self._reach[at] >= wanted[:, 1])
        return np.where(held, self._best[at], -1)

    def hold(self, wanted: U64) -> bool:
        """Whether each range lies within one row."""
        return bool((self.find(wanted) >= 0).all())

    def touch(self, wanted: U64) -> NDArray[np.bool_]:
        """For each range whether it has bytes in common with any row."""
        at = self._starts.searchsorted(wanted[:, 1], side="left") - 1
        return (at >= 0) & (self._reach[at] > wanted[:, 0]) if len(self._starts) else at >= 0

    def exact(self, wanted: U64) -> NDArray[np.bool_]:
        """For each range whether it is a row."""
        found = np.zeros(len(wanted), dtype=bool)
        at = self._starts.searchsorted(wanted[:, 0], side="left")
        open_ = np.arange(len(wanted))
        while len(open_):
            open_ = open_[at[open_] < len(self._starts)]
            open_ = open_[self._starts[at[open_]] == wanted[open_, 0]]
            hits = self.pairs[at[open_], 1] == wanted[open_, 1]
            found[open_[hits]] = True
            open_ = open_[~hits]
            at[open_] += 1
        return found

    def clash(self, wanted: U64) -> bool:
        """Whether any range overlaps rows without being one of them."""
        return bool((self.touch(wanted) & ~self.exact(wanted)).any())

    def with_(self, pairs: U64) -> Ranges:
        """These and more."""
        return Ranges(np.concatenate((self.pairs, pairs)))

    def without(self, pairs: U64) -> Ranges:
        """These but the rows that equal one of ``pairs``."""
        return Ranges(self.pairs[~Ranges(pairs).exact(self.pairs)])


def none() -> U64:
    """No ranges."""
    return np.empty((0, 2), dtype=np.uint64)


def spans(extents: Extents) -> U64 | None:
    """(start, end) of what is used of each tensor; None if it is beyond 64 bits."""
    if not extents.nbytes:
        return none()
    offsets, bases = extents.offsets, extents.bases
    stops = offsets + extents.lengths
    first, stop = (offsets, stops) if len(offsets) == 1 else (offsets.min(), stops.max())
    pairs = np.empty((len(bases), 2), dtype=np.uint64)
    np.add(bases, first, out=pairs[:, 0])
    np.add(bases, stop, out=pairs[:, 1])
    whole = (stops >= offsets).all() and ((pairs[:, 0] >= bases) & (pairs[:, 1] > pairs[:, 0])).all()
    return pairs if whole else None


class Book:
    """Which ranges are registered, and for how many. Not thread-safe.

    What lies within a registered range needs none of its own; what only overlaps one gets a range around
    both, so that the widest one is always the right one to use.
    """

    def __init__(self) -> None:
        self.ranges = Ranges(none())
        self._uses: Counter[tuple[int, int]] = Counter()

    def plan(self, wanted: U64) -> tuple[U64, U64]:
        """Rows that will hold these ranges, and those of them that are new."""
        wanted = _disjoint(wanted)
        found = self.ranges.find(wanted)
        known = self.ranges.pairs[found[found >= 0]]
        new = wanted[found < 0]
        if self.ranges.touch(new).any():
            new = self._widened(new)
        used = np.unique(np.concatenate((known, new)), axis=0)
        return used, new

    def add(self, used: U64, new: U64) -> None:
        """Enters what ``plan`` gave."""
        self._uses.update(map(tuple, used.tolist()))
        if len(new):
            self.ranges = self.ranges.with_(new)

    def remove(self, used: U64) -> U64:
        """The end of an ``add``; returns the rows that nobody uses any more."""
        rows = list(map(tuple, used.tolist()))
        self._uses.subtract(rows)
        over = [row for row in rows if self._uses[row] <= 0]
        for row in over:
            del self._uses[row]
        gone = np.array(over, dtype=np.uint64).reshape(-1, 2)
        if len(gone):
            self.ranges = self.ranges.without(gone)
        return gone

    def _widened(self, new: U64) -> U64:
        while True:
            near = self.ranges.pairs[Ranges(new).touch(self.ranges.pairs)]
            wider = _disjoint(np.concatenate((new, near)))
            if np.array_equal(wider, new):
                return new
            new = wider


def _disjoint(pairs: U64) -> U64:
    """Overlapping ranges become one; those that touch do not."""
    pairs = np.unique(pairs, axis=0)
    if len(pairs) < 2:
        return pairs
    reach = np.maximum.accumulate(pairs[:, 1])
    heads = np.ones(len(pairs), dtype=bool)
    np.greater_equal(pairs[1:, 0], reach[:-1], out=heads[1:])
    at = np.flatnonzero(heads)
    joined = np.empty((len(at), 2), dtype=np.uint64)
    joined[:, 0] = pairs[at, 0]
    joined[:, 1] = reach[np.append(at[1:], len(pairs)) - 1]
    return joined
