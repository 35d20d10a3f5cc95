"""Host memory: what is mapped, and how, without touching a page.

Strategy: one reading of /proc/self/maps, neighbouring mappings joined, then a vectorised look-up.
Invariant: a "no" is said only after a second reading, because the file is not a snapshot: a mapping that
is split or merged by another thread meanwhile may be missing from one reading.
Threads: all functions may be called from any thread.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import ArrayLike

from llm_datadist._core.segments import U64, Extents
from llm_datadist._shortages import named

_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (....) [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([0-9]+)", re.MULTILINE)
_READABLE = re.compile(rb"r...")
_WRITABLE = re.compile(rb".w..")
_WRITABLE_PRIVATE = re.compile(rb".w.p")
_TOP = 1 << 64


def first_unmapped(addresses: ArrayLike, nbytes: int) -> int | None:
    """The first tensor that is not wholly mapped and readable.

    Args:
        addresses: (n,) addresses, uint64.
        nbytes: Bytes of each tensor.

    Returns:
        Its index, or None when all are.
    """
    return _first_outside(addresses, nbytes, _READABLE)


def is_writable(address: int, nbytes: int) -> bool:
    """Whether the whole of [address, address + nbytes) is mapped and may be written."""
    return first_unwritable([address], nbytes) is None


def first_unwritable(addresses: ArrayLike, nbytes: int | U64) -> int | None:
    """The first tensor that is not wholly mapped and writable; see :func:`first_unmapped`.

    ``nbytes`` may be an array, none 0.
    """
    return _first_outside(addresses, nbytes, _WRITABLE)


def first_unwritable_run(extents: Extents) -> tuple[int, int] | None:
    """The first run that is not wholly mapped and writable: its tensor, by position, and its address."""
    if not extents.nbytes:
        return None
    for _ in range(2):
        found = _first_run_outside(extents, *_joined(_WRITABLE, False))
        if found is None:
            return None
    return found


def _first_run_outside(extents: Extents, low: U64, high: U64) -> tuple[int, int] | None:
    first = extents.offsets.min()
    whole = int((extents.offsets + extents.lengths).max()) - int(first)
    for row in np.flatnonzero(_outside(extents.bases + first, whole, low, high)).tolist():
        starts = extents.offsets + extents.bases[row]  # a hole between the runs does no harm
        outside = _outside(starts, extents.lengths, low, high)
        if outside.any():
            return row, int(starts[outside.argmax()])
    return None


def first_not_anonymous(addresses: ArrayLike, nbytes: int | U64) -> int | None:
    """The first tensor that is not wholly in writable, private memory of no file; see :func:`first_unwritable`.

    What is mapped of a file stays in the table when the file is cut short, and is SIGBUS from then on.
    """
    return _first_outside(addresses, nbytes, _WRITABLE_PRIVATE, anonymous=True)


def _first_outside(
    addresses: ArrayLike, nbytes: int | U64, rights: re.Pattern[bytes], anonymous: bool = False
) -> int | None:
    starts = np.atleast_1d(np.asarray(addresses, dtype=np.uint64))
    if not len(starts) or (isinstance(nbytes, int) and nbytes <= 0):
        return None
    for _ in range(2):
        outside = _outside(starts, nbytes, *_joined(rights, anonymous))
        if not outside.any():
            return None
    return int(outside.argmax())


def _outside(
    starts: U64, nbytes: int | U64, low: U64, high: U64
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of [start, start + nbytes) lie in none of the (sorted, disjoint) mappings [low, high)."""
    if not len(low) or (isinstance(nbytes, int) and nbytes >= _TOP):
        return np.ones(len(starts), dtype=bool)
    at = low.searchsorted(starts, side="right").astype(np.int64) - 1
    room = np.where((at >= 0) & (starts < high[at]), high[at] - starts, np.uint64(0))
    below: np.ndarray[tuple[int], np.dtype[np.bool_]] = room < np.asarray(nbytes, dtype=np.uint64)
    return below


def _joined(rights: re.Pattern[bytes], anonymous: bool) -> tuple[U64, U64]:
    """Ascending [low, high) of the memory that has these rights, as two columns; only what is of no file, if asked.

    Raises:
        OutOfMemoryError: There is no descriptor to read it with.
    """
    with named("the memory of this process cannot be looked up"), open("/proc/self/maps", "rb") as file:
        lines = _LINE.findall(file.read())
    joined: list[list[int]] = []
    for first, end, has, inode in lines:
        if not rights.match(has) or (anonymous and int(inode)):
            continue
        low, high = int(first, 16), int(end, 16)
        if joined and joined[-1][1] == low:
            joined[-1][1] = high
        else:
            joined.append([low, high])
    bounds = np.array(joined, dtype=np.uint64).reshape(-1, 2)
    return bounds[:, 0], bounds[:, 1]
