"""A page allocator: best fit, neighbours merge, all of it usable. Pure; called under the engine's lock."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PagePool:
    """``pages`` pages in a row.

    Free runs are kept twice: by start, to merge neighbours, and by (length, start), to find the best fit.
    """

    pages: int
    _by_start: list[tuple[int, int]] = field(init=False)  # (start, length)
    _by_length: list[tuple[int, int]] = field(init=False)  # (length, start)

    def __post_init__(self) -> None:
        self._by_start = [(0, self.pages)]
        self._by_length = [(self.pages, 0)]

    @property
    def free_pages(self) -> int:
        """Pages that are free."""
        return sum(length for length, _ in self._by_length)

    @property
    def largest_free_pages(self) -> int:
        """Pages of the longest free run."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """Takes one run of each size (in pages); all or nothing.

        Returns:
            The first page of each run, in order; None when one does not fit.
        """
        starts: list[int] = []
        for size in sizes:
            at = bisect.bisect_left(self._by_length, (size, -1))
            if at == len(self._by_length):
                self.free(starts, sizes[: len(starts)])
                return None
            length, start = self._by_length[at]
            self._remove(start, length)
            if length > size:
                self._insert(start + size, length - size)
            starts.append(start)
        return starts

    def free(self, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Gives runs back, as they were allocated."""
        for start, size in zip(starts, sizes, strict=True):
            at = bisect.bisect_left(self._by_start, (start, -1))
            length = size
            if at < len(self._by_start) and self._by_start[at][0] == start + size:
                length += self._by_start[at][1]
                self._remove(*self._by_start[at])
            if at and sum(self._by_start[at - 1]) == start:
                before = self._by_start[at - 1]
                self._remove(*before)
                start, length = before[0], before[1] + length
            self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        bisect.insort(self._by_start, (start, length))
        bisect.insort(self._by_length, (length, start))

    def _remove(self, start: int, length: int) -> None:
        del self._by_start[bisect.bisect_left(self._by_start, (start, length))]
        del self._by_length[bisect.bisect_left(self._by_length, (length, start))]
