"""What peers may write at raw addresses: an immutable look at the registry, searched without its lock.

Strategy: tensors sorted by start, each with the furthest end of all that begin at or before it: a range that
begins at or after that start and ends by that end lies within one of them. Everything is n log n in what the
peer has sent, plus, for bases whose blocks lie in several tensors, the ends of the tensors between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core import limits
from llm_datadist._core.segments import U64
from llm_datadist.status import ParamInvalidError

if TYPE_CHECKING:
    from llm_datadist._core.registry import Record


class OpenMemory:
    """The remote-accessible caches of one instant."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    @cached_property
    def _cover(self) -> _Cover:
        return _Cover(self._records)

    def owners_of(self, bases: U64, offsets: U64, lengths: U64) -> list[Record]:
        """The caches that hold the ranges base + offset, length, for each of ``bases``.

        A cache that lies wholly between two ranges of one base counts as touched too.

        Raises:
            ParamInvalidError: A range does not lie wholly within one of their tensors, or too many ends of tensors
                lie between them.
        """
        cover, units = self._cover, _Units(offsets, lengths)
        different = np.unique(bases)
        # Mostly everything between the first and the last unit lies in one tensor.
        apart = different[~cover.holds(different + units.low, different + units.high)]
        bad = cover.not_held(apart, units)
        if bad is not None:
            self._refuse(bases[int(np.isin(bases, bad).argmax())], offsets, lengths)
        touched = cover.owners[cover.meeting(different + units.low, different + units.high)]
        return [self._records[at] for at in np.unique(touched).tolist()]

    def _refuse(self, base: np.uint64, offsets: U64, lengths: U64) -> None:
        starts = base + offsets
        at = int(np.argmin(self._cover.holds(starts, starts + lengths)))
        start = int(starts[at])
        raise ParamInvalidError(
            f"[{start:#x}, {start + int(lengths[at]):#x}) does not lie in one tensor that is registered "
            "remote-accessible at the destination; register it there with remote_accessible=True"
        )


class _Units:
    """Ranges from a base, sorted. ``tops``: the furthest end of all up to each."""

    def __init__(self, offsets: U64, lengths: U64) -> None:
        order = np.argsort(offsets, kind="stable")
        self.starts = offsets[order]
        self.tops: U64 = np.maximum.accumulate(self.starts + lengths[order])
        self.low, self.last, self.high = self.starts[0], self.starts[-1], self.tops[-1]


class _Cover:
    """Tensors by start address. ``owners``: of each, the place of its cache among the records."""

    def __init__(self, records: Sequence[Record]) -> None:
        nothing = [np.empty(0, dtype=np.uint64)]
        starts = np.concatenate(nothing + [r.addresses for r in records])
        ends = np.concatenate(nothing + [r.addresses + np.uint64(r.layout.tensor_nbytes) for r in records])
        order = np.argsort(starts, kind="stable")
        self.owners = np.repeat(np.arange(len(records)), [len(r.addresses) for r in records])[order]
        self._starts, self._ends = starts[order], ends[order]
        self._reach: U64 = np.maximum.accumulate(self._ends)

    def holds(self, starts: U64, ends: U64) -> NDArray[np.bool_]:
        """Whether each range lies within one tensor."""
        if not len(self._starts):
            return np.zeros(len(starts), dtype=bool)
        at = self._at(starts)
        inside: NDArray[np.bool_] = (at >= 0) & (self._reach[np.maximum(at, 0)] >= ends)
        return inside

    def meeting(self, starts: U64, ends: U64) -> NDArray[np.bool_]:
        """Whether each tensor meets one of the ranges, which are sorted by start."""
        last = np.searchsorted(starts, self._ends, side="left").astype(np.int64) - 1
        met: NDArray[np.bool_] = (last >= 0) & (np.maximum.accumulate(ends)[last] > self._starts)
        return met

    def not_held(self, bases: U64, units: _Units) -> U64 | None:
        """The bases from which a unit lies in no tensor; None: there are none.

        The tensor that a unit must lie in changes where another one starts, and its reach never falls. So it is
        enough to look, at each of these places, at the furthest end of the units before it.
        """
        if not len(bases):
            return None
        if not len(self._starts):
            return bases
        first, last = self._at(bases + units.low), self._at(bases + units.last)
        counts = last - first + 1
        if int(counts.sum()) > limits.PUSH_EDGES:
            raise ParamInvalidError(
                f"{int(counts.sum())} ends of tensors lie between the blocks of a push to raw addresses; at most "
                f"{limits.PUSH_EDGES} are looked up: push it in parts"
            )
        of = np.repeat(np.arange(len(bases)), counts)
        at = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + first[of]
        following = self._starts[np.minimum(at + 1, len(self._starts) - 1)] - bases[of]
        unit = np.searchsorted(units.starts, following, side="left") - 1
        unit = np.where(at == last[of], len(units.starts) - 1, unit)
        held = (at >= 0) & (bases[of] + units.tops[unit] <= self._reach[np.maximum(at, 0)])
        held |= unit < 0  # none begins before that place
        return None if held.all() else bases[np.unique(of[~held])]

    def _at(self, starts: U64) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, starts, side="right").astype(np.int64) - 1
