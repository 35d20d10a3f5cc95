"""A reader's memory in a conformance case: filled, read into, and compared to the last byte with a model.

Invariant: between two reads every byte is ``FILL``, so that each byte that changed is seen.
Threads: one board, one thread.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.owner import Memory, pattern
from llm_datadist.transports.seam import FaultKind, Progress

if TYPE_CHECKING:
    from llm_datadist.testing.transports import Pair

Runs = Sequence[tuple[int, int]]
Bytes = NDArray[np.uint8]

FILL = 0xA5
PAGE = 4096
PROMPT_S = 1.0  # what must end at once, or at its deadline, has this much room on a busy machine
_PATIENCE_S = 30.0  # for what must succeed, however slow the machine
_AFTERMATH_S = 0.3  # how long we look for writes that come late


def uncut(cancel: Callable[[str], None] | None) -> None:
    """What is told how to cut a read off, and never does."""


def soon() -> float:
    """A deadline that nothing reaches on a machine that works."""
    return time.monotonic() + _PATIENCE_S


def extents(bases: Sequence[int], runs: Runs) -> Extents:
    """Ranges (offset, nbytes) of each tensor."""
    table = np.array(runs, dtype=np.uint64).reshape(-1, 2)
    return Extents.of(np.array(bases, dtype=np.uint64), table[:, 0], table[:, 1])


class Board:
    """Tensors of the owner, filled with a pattern, and tensors of the reader, each from a page's start.

    Args:
        pair: Who reads whom.
        sources: Bytes of each tensor of the owner.
        destinations: Bytes of each tensor here.
    """

    def __init__(self, pair: Pair, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.pair = pair
        self.memory = Memory()
        seed = sum(sources) + len(sources)
        self._sources = [pattern(seed + i, n) for i, n in enumerate(sources)]
        self.bases = pair.allocate(sources, seed)
        starts = [PAGE]  # a margin of a page before, between and after
        for size in destinations:
            starts.append(starts[-1] + -(-size // PAGE) * PAGE + PAGE)
        address = self.memory.map_sparse(starts[-1])
        self._forget = _registered(pair, address, starts[-1])
        self._all = _view(address, starts[-1])
        self._starts = starts[:-1]
        self.here = [address + start for start in self._starts]
        self.refill()

    def close(self) -> None:
        """Unmaps the memory of both sides."""
        self.close_here()
        for base, source in zip(self.bases, self._sources, strict=True):
            self.pair.unmap(base, max(1, len(source)))

    def close_here(self) -> None:
        """Unmaps this side's: all there is when the owner has gone."""
        del self._all
        self._forget()
        self.memory.close()

    def refill(self) -> None:
        """Makes every byte here ``FILL``."""
        self._all.fill(FILL)

    def whole_source(self) -> Extents:
        """All of the owner's tensors, which are of one size."""
        return extents(self.bases, [(0, len(self._sources[0]))])

    def whole_destination(self) -> Extents:
        """As much of the tensors here."""
        return extents(self.here, [(0, len(self._sources[0]))])

    def plan(self, src: Runs, dst: Runs) -> Segments:
        """The same ranges of each tensor."""
        return Segments(self.pair.source(extents(self.bases, src)), extents(self.here, dst))

    def read(self, src: Runs, dst: Runs, deadline: float | None = None) -> Progress:
        """Plans and reads."""
        plan = self.plan(src, dst)
        return self.pair.channel.read(plan).wait(deadline=soon() if deadline is None else deadline)

    def check_read(self, src: Runs, dst: Runs) -> None:
        """Reads, and compares every byte here with the model; then all is ``FILL`` again."""
        self._check(self.read(src, dst), sum(n for _, n in dst) * len(self.here), self._moved(src, dst))

    def check_moved(self, src: Runs, dst: Runs) -> None:
        """The same for a read that was done in another way."""
        check_same(self._all, self._moved(src, dst))
        self.refill()

    def _moved(self, src: Runs, dst: Runs) -> Bytes:
        expected = self._blank()
        for start, source in zip(self._starts, self._sources, strict=True):
            stream = np.concatenate([source[at : at + n] for at, n in src] or [source[:0]])
            for at, n in dst:
                expected[start + at : start + at + n], stream = stream[:n], stream[n:]
        return expected

    def check_blocks(self, src: NDArray[np.int64], dst: NDArray[np.int64], size: int) -> None:
        """The same for blocks of ``size`` bytes; here each is followed by a byte that must not change."""
        there = Extents.of(_u64(self.bases), _u64(src * size), np.full(len(src), size, dtype=np.uint64))
        here = Extents.of(_u64(self.here), _u64(dst * (size + 1)), np.full(len(dst), size, dtype=np.uint64))
        progress = self.pair.channel.read(Segments(self.pair.source(there), here)).wait(deadline=soon())
        expected = self._blank()
        for start, source in zip(self._starts, self._sources, strict=True):
            table = expected[start : start + len(dst) * (size + 1)].reshape(-1, size + 1)
            table[dst, :size] = source[: len(src) * size].reshape(-1, size)[src]
        self._check(progress, len(dst) * size * len(self.here), expected)

    def check_holds(self, progress: Progress, content: dict[int, bytes]) -> None:
        """The first tensor holds these bytes at these offsets, and there is nothing else anywhere."""
        expected = self._blank()
        for at, data in content.items():
            expected[self._starts[0] + at : self._starts[0] + at + len(data)] = np.frombuffer(data, np.uint8)
        self._check(progress, sum(map(len, content.values())), expected)

    def check_range_unchanged(self, at: int, nbytes: int) -> None:
        """This range of the first tensor is still ``FILL``."""
        start = self._starts[0] + at
        check_same(self._all[start : start + nbytes], np.full(nbytes, FILL, dtype=np.uint8))

    def check_only_changed(self, dst: Runs) -> None:
        """Whatever these ranges hold, nothing else has changed; then everything is ``FILL`` again."""
        changed = self._all != FILL
        for start in self._starts:
            for at, n in dst:
                changed[start + at : start + at + n] = False
        if changed.any():
            raise AssertionError(f"byte {int(changed.argmax())} changed; it is outside the destination")
        self.refill()

    def check_still(self) -> None:
        """Nothing is written here for a while."""
        self.refill()
        time.sleep(_AFTERMATH_S)
        self.check_only_changed([])

    def _blank(self) -> Bytes:
        return np.full(len(self._all), FILL, dtype=np.uint8)

    def _check(self, progress: Progress, nbytes: int, expected: Bytes) -> None:
        if progress != Progress(nbytes):
            raise AssertionError(f"the read should have moved {nbytes} bytes; it ended with {progress}")
        check_same(self._all, expected)
        self.refill()


class SparseBoard:
    """A large destination that takes no memory until it is written; its plan takes a while.

    Args:
        pair: Who reads whom.
        nbytes: Bytes of the plan.
    """

    def __init__(self, pair: Pair, nbytes: int) -> None:
        part, count = nbytes // 16, 16
        self._pair = pair
        self._part = part
        self._memory = Memory()
        self._nbytes = part * count
        self._there = pair.map_sparse(part)
        pair.write(self._there, b"\x01")
        self._here = self._memory.map_sparse(self._nbytes)
        self._forget = _registered(pair, self._here, self._nbytes)
        self._first = _view(self._here, 1)
        there = extents([self._there] * count, [(0, part)])
        here = extents([self._here + i * part for i in range(count)], [(0, part)])
        self.plan = Segments(pair.source(there), here)

    def close(self) -> None:
        """Unmaps the memory of both sides."""
        self._forget()
        self._memory.close()

    def begun(self) -> bool:
        """Whether the first byte has arrived."""
        return bool(self._first[0])

    def check_still(self) -> None:
        """Nothing is written here for a while: no page comes back after all were given away."""
        self._memory.drop(self._here, self._nbytes)
        time.sleep(_AFTERMATH_S)
        pages = self._memory.resident_pages(self._here, self._nbytes)
        if pages:
            raise AssertionError(f"{pages} pages were written after the read had ended")


def _registered(pair: Pair, address: int, nbytes: int) -> Callable[[], None]:
    """Tells a pair of a registering transport of memory to read into; returns how to take that back."""
    register = getattr(pair, "register_destination", None)
    return register(address, nbytes) if register is not None else lambda: None


def check_same(actual: Bytes, expected: Bytes) -> None:
    """Equal to the last byte."""
    if not np.array_equal(actual, expected):
        wrong = np.flatnonzero(actual != expected)
        at = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} wrong bytes, first at {at}: {actual[at]:#04x} instead of {expected[at]:#04x}"
        )


@contextmanager
def board_of(pair: Pair, sources: Sequence[int], destinations: Sequence[int]) -> Iterator[Board]:
    """A board, closed at the end."""
    board = Board(pair, sources, destinations)
    try:
        yield board
    finally:
        board.close()


def check_fault(progress: Progress, kind: FaultKind, nbytes: int) -> None:
    """The read ended with this kind of fault, a text, and a count that can be."""
    if progress.fault is None or progress.fault.kind is not kind:
        raise AssertionError(f"the read should have ended with {kind}; it ended with {progress}")
    if not progress.fault.text or not 0 <= progress.nbytes <= nbytes:
        raise AssertionError(f"no text, or an impossible count of {nbytes} bytes: {progress}")


def _view(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _u64(values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.asarray(values, dtype=np.uint64)
