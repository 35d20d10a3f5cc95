"""Plans of bytes: a canonical stream on each side of a transfer, factored as tensors x runs.

The order of bytes is part of the protocol: tensors ascending, within each the runs in list order.
``Extents`` is one side of it; every side merges, splits and batches on its own, because only the
position in the stream is shared. Nothing here is proportional to tensors x blocks except one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]


class Extents(msgspec.Struct, frozen=True, eq=False):
    """Memory on one side, in stream order. Build with :meth:`of`.

    Attributes:
        bases: (T,) uint64, address of each tensor.
        offsets: (R,) uint64, start of each run within a tensor.
        lengths: (R,) uint64, bytes of each run, none 0.
        ends: (R,) uint64, running total of ``lengths``.
        row_nbytes: Bytes taken from each tensor.
    """

    bases: U64
    offsets: U64
    lengths: U64
    ends: U64
    row_nbytes: int

    @classmethod
    def of(cls, bases: U64, offsets: U64, lengths: U64) -> Extents:
        """Merges neighbouring runs (once, on the run list) and drops empty ones."""
        bases = np.ascontiguousarray(bases, dtype=np.uint64)
        offsets, lengths = (np.ascontiguousarray(a, dtype=np.uint64) for a in (offsets, lengths))
        if len(lengths) and not lengths.all():
            kept = lengths != 0
            offsets, lengths = offsets[kept], lengths[kept]
        if len(offsets) > 1:
            heads = np.empty(len(offsets), dtype=bool)
            heads[0] = True
            np.not_equal(offsets[1:], offsets[:-1] + lengths[:-1], out=heads[1:])
            if not heads.all():
                starts = np.flatnonzero(heads)
                offsets, lengths = offsets[starts], np.add.reduceat(lengths, starts)
        ends = np.cumsum(lengths, dtype=np.uint64)
        return cls(bases, offsets, lengths, ends, int(ends[-1]) if len(ends) else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stream."""
        return self.row_nbytes * len(self.bases)

    def moved(self, shifts: U64) -> Extents:
        """The same where each tensor is ``shifts`` bytes further, modulo 2**64."""
        return Extents(self.bases + shifts, self.offsets, self.lengths, self.ends, self.row_nbytes)

    def take(self, start: int, max_nbytes: int, max_runs: int) -> tuple[U64, U64, int]:
        """Expands the stream from byte ``start``, at most ``max_nbytes`` bytes and ``max_runs`` runs.

        Returns:
            Addresses (n,) uint64, lengths (n,) uint64, and the bytes they cover (0 at the end).
        """
        pairs, nbytes = self.take_pairs(start, max_nbytes, max_runs)
        return pairs[:, 0], pairs[:, 1], nbytes

    def take_pairs(self, start: int, max_nbytes: int, max_runs: int) -> tuple[U64, int]:
        """The same as :meth:`take`, as (n, 2) rows of (address, nbytes): the layout of an iovec array."""
        stop = min(start + max_nbytes, self.nbytes)
        if stop <= start or max_runs <= 0:
            return np.empty((0, 2), dtype=np.uint64), 0
        runs = len(self.offsets)
        row, run = self._find(start)
        last_row, last_run = self._find(stop - 1)
        count = (last_row - row) * runs + last_run - run + 1
        if count > max_runs:
            count = max_runs
            last_row, last_run = divmod(row * runs + run + count - 1, runs)
            stop = last_row * self.row_nbytes + int(self.ends[last_run])
        pairs = self._rows(row, run, last_row, last_run)
        excess = last_row * self.row_nbytes + int(self.ends[last_run]) - stop
        if excess:
            pairs[-1, 1] -= np.uint64(excess)
        skip = start - row * self.row_nbytes - int(self.ends[run] - self.lengths[run])
        if skip:
            pairs[0, 0] += np.uint64(skip)
            pairs[0, 1] -= np.uint64(skip)
        return pairs, stop - start

    def _find(self, position: int) -> tuple[int, int]:
        """Tensor and run that hold a byte of the stream."""
        row, within = divmod(position, self.row_nbytes)
        # A Python int would turn the whole column into float64: slow, and wrong from 2**53 on.
        return row, int(self.ends.searchsorted(np.uint64(within), side="right"))

    def _rows(self, row: int, run: int, last_row: int, last_run: int) -> U64:
        """(address, nbytes) of every run from (row, run) to (last_row, last_run), both included."""
        runs = len(self.offsets)
        if row == last_row:
            return self._part(row, run, last_run + 1)
        if last_row == row + 1:
            return np.concatenate((self._part(row, run, runs), self._part(last_row, 0, last_run + 1)))
        whole = np.empty((last_row - row + 1, runs, 2), dtype=np.uint64)
        np.add(self.bases[row : last_row + 1, None], self.offsets, out=whole[:, :, 0])
        whole[:, :, 1] = self.lengths
        return whole.reshape(-1, 2)[run : (last_row - row) * runs + last_run + 1]

    def _part(self, row: int, run: int, run_stop: int) -> U64:
        pairs = np.empty((run_stop - run, 2), dtype=np.uint64)
        np.add(self.offsets[run:run_stop], self.bases[row], out=pairs[:, 0])
        pairs[:, 1] = self.lengths[run:run_stop]
        return pairs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Extents):
            return NotImplemented
        pairs = ((self.bases, other.bases), (self.offsets, other.offsets), (self.lengths, other.lengths))
        return all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


class Segments(msgspec.Struct, frozen=True):
    """A plan: where the bytes come from and where they go, both in stream order.

    ``source`` is the peer's memory (one-sided transports on the same host) or the opaque selector with
    which the owner finds it (all others; see ``transports.seam.ReadSource``).
    """

    source: Extents | bytes
    destination: Extents

    @property
    def nbytes(self) -> int:
        """Bytes that the plan moves."""
        return self.destination.nbytes

    def expand(self, max_runs: int) -> Iterator[tuple[U64, U64, U64]]:
        """Batches of matched (source address, destination address, nbytes), for engines that want pairs."""
        if not isinstance(self.source, Extents):
            raise TypeError("expand needs the source's addresses; this plan has a selector")
        at = 0
        while at < self.nbytes:
            source, _ = self.source.take_pairs(at, 1 << 62, max_runs)
            destination, _ = self.destination.take_pairs(at, 1 << 62, max_runs)
            src, dst, nbytes = (column[:max_runs] for column in matched(source, destination))
            yield src, dst, nbytes
            at += int(nbytes.sum())


def matched(source: U64, destination: U64) -> tuple[U64, U64, U64]:
    """Both sides of the same stretch of a stream, cut where either is cut, until the shorter one ends.

    Args:
        source: (n, 2) rows of (address, nbytes), as ``Extents.take_pairs`` gives them.
        destination: (m, 2) rows.

    Returns:
        Source addresses, destination addresses and bytes of each piece.
    """
    if len(source) == len(destination) and np.array_equal(source[:, 1], destination[:, 1]):
        return source[:, 0], destination[:, 0], source[:, 1]
    there, here = np.cumsum(source[:, 1]), np.cumsum(destination[:, 1])
    cuts = np.union1d(there, here)
    cuts = cuts[cuts <= min(there[-1], here[-1])]
    starts = np.concatenate((np.zeros(1, np.uint64), cuts[:-1]))
    return _at(source[:, 0], there, starts), _at(destination[:, 0], here, starts), cuts - starts


def _at(addresses: U64, ends: U64, positions: U64) -> U64:
    """The address of each stream position within runs that end at ``ends``."""
    run = np.searchsorted(ends, positions, side="right")
    begins = np.concatenate((np.zeros(1, np.uint64), ends[:-1]))
    shifted: U64 = addresses[run] + (positions - begins[run])
    return shifted
