"""Copies of many pieces between mappings of this process, with the GIL released.

Strategy: both sides are seen as arrays of units, the largest piece that divides everything; NumPy gathers
units into a buffer that fits the second-level cache and scatters them from there, so that each byte crosses
the memory bus once a side. Long runs are copied one by one, by ``memmove``.
Each of these calls has to get the GIL back. While another thread runs Python that takes up to 5 ms a call, and
a copy in small pieces would crawl; it notices, and stops early for the caller to go on in larger ones.
Invariant: addresses are used as they are; what is not mapped, or not writable, is a SIGSEGV.
Threads: each thread has a buffer of its own.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import U64, Extents
from llm_datadist.transports._waits import times_waited as _times_waited
from llm_datadist.transports.shm_areas import Box

CHUNK_NBYTES = 512 << 10  # measured: 256 KiB to 1 MiB are alike; a core's own cache has 0.5 to 2 MiB
MAX_ROW_UNITS = 4 << 20  # their indices are kept for the time of the read: 64 MiB for both sides
_MAX_UNIT_NBYTES = 512  # NumPy gives the GIL up for 500 pieces and more; this is twice as many a chunk
MIN_UNIT_NBYTES = 64  # below it, a step per unit costs more than the kernel's per range
SLOW_S = 0.003  # for a chunk: the interpreter's switch interval is 5 ms, the copy itself takes 0.1 ms
_TURNS = 4  # of the largest steps: 2 MiB
_PATIENCE = 2  # chunks in a row; one alone may have been a busy machine

_local = threading.local()


class Units:
    """Memory as an array of units.

    Args:
        extents: What of it is used, in stream order.
        box: Of it.
        nbytes: Bytes of a unit; divides every length, and every distance of two starts.
    """

    __slots__ = ("_of_row", "_rows", "array")

    def __init__(self, extents: Extents, box: Box, nbytes: int) -> None:
        self.array: NDArray[np.void] = np.asarray(_Memory(box.low, (box.high - box.low) // nbytes, nbytes))
        self._rows = _whole(extents.bases - np.uint64(box.low - box.offset), nbytes)
        self._of_row = _spread(
            _whole(extents.offsets - np.uint64(box.offset), nbytes),
            extents.lengths,
            extents.row_nbytes // nbytes,
            nbytes,
        )

    def indices(self, start: int, stop: int) -> NDArray[np.intp]:
        """The units of [start, stop) of the stream, in units, within the array."""
        width = len(self._of_row)
        row, last = start // width, (stop - 1) // width
        if row == last:
            part: NDArray[np.intp] = self._of_row[start - row * width : stop - row * width] + self._rows[row]
            return part
        whole = self._rows[row : last + 1, None] + self._of_row
        return whole.reshape(-1)[start - row * width : stop - row * width]


def _whole(values: U64, nbytes: int) -> NDArray[np.intp]:
    """Bytes in units."""
    units: NDArray[np.intp] = (values // np.uint64(nbytes)).astype(np.intp)
    return units


def _spread(first: NDArray[np.intp], lengths: U64, total: int, nbytes: int) -> NDArray[np.intp]:
    """Every unit, ``total`` of them, of runs that begin with unit ``first[i]``."""
    if total == len(first):
        return first
    counts = _whole(lengths, nbytes)
    spread: NDArray[np.intp] = np.repeat(first - (np.cumsum(counts) - counts), counts)
    return spread + np.arange(total)


class _Memory:
    """What NumPy makes an array of without asking whose memory it is; one without an end keeps nothing alive."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, count: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count,),
            "typestr": f"|V{nbytes}",
        }


class Pace:
    """How many pieces to copy until the clock is looked at again.

    A thread that the system does not run is slow too, but does not give way itself.

    Args:
        most: Pieces, however well it goes.
        first: Pieces of the first step: few where each is a call, so that a busy interpreter is noticed early.
        must_stop: Asked now and then.
        patient: Most at once, and no looking at the clock: there is no better way.

    Attributes:
        slow: The steps had to wait for the GIL.
    """

    __slots__ = (
        "_began",
        "_first",
        "_late",
        "_must_stop",
        "_patient",
        "_step",
        "_turn",
        "_waits",
        "most",
        "slow",
    )

    def __init__(self, most: int, first: int, must_stop: Callable[[], bool], patient: bool) -> None:
        self.most = max(1, most)
        self.slow = False
        self._must_stop = must_stop
        self._patient = patient
        self._turn = 0
        self._late = 0
        self._first = max(1, first)
        self._step = 0
        self._waits = _times_waited()
        self._began = time.monotonic()

    def next_step(self) -> int:
        """Pieces; 0: enough, because it is slow or must stop."""
        self._turn += 1
        if self._turn % _TURNS == 0 and self._must_stop():
            return 0
        if self._patient:
            return self.most
        now = time.monotonic()
        if now - self._began <= SLOW_S:
            self._late = 0
            self._step = min(self.most, self._step * 2 or self._first)
        else:
            before, self._waits = self._waits, _times_waited()
            self._late += self._waits > before
            self._step = self._first
        self._began = now
        self.slow = self._late >= _PATIENCE
        return 0 if self.slow else self._step


def unit_nbytes(*sides: tuple[Extents, Box]) -> int:
    """The largest unit of all sides."""
    unit = 0
    for extents, box in sides:
        unit = _divisor(unit, extents.lengths)
        unit = _divisor(unit, extents.offsets - np.uint64(box.offset))
        unit = _divisor(unit, extents.bases - np.uint64(box.low - box.offset))
    return next((u for u in range(_MAX_UNIT_NBYTES, _MAX_UNIT_NBYTES // 2, -1) if unit % u == 0), unit)


def _divisor(unit: int, values: U64) -> int:
    return int(np.gcd.reduce(values, initial=np.uint64(unit)))


def copy_units(
    source: Units, si: NDArray[np.intp], destination: Units, di: NDArray[np.intp], pace: Pace
) -> int:
    """Copies unit ``si[i]`` to ``di[i]``.

    Returns:
        The number of units copied; not all of them if the pace said so.
    """
    there, here = source.array, destination.array
    buffer = _buffer(pace.most * there.itemsize).view(there.dtype)
    at = 0
    while at < len(si):
        step = pace.next_step()
        if not step:
            break
        part = si[at : at + step]
        some = buffer[: len(part)]
        # Clipping never happens; raising would make NumPy copy the output once more.
        there.take(part, out=some, mode="clip")
        here[di[at : at + step]] = some
        at += len(part)
    return at


def copy_runs(source: U64, destination: U64, nbytes: U64, pace: Pace) -> int:
    """Copies ``nbytes[i]`` bytes from ``source[i]`` to ``destination[i]``; returns as :func:`copy_units`."""
    there, here, sizes = source.tolist(), destination.tolist(), nbytes.tolist()
    at = 0
    while at < len(sizes):
        step = pace.next_step()
        if not step:
            break
        part = slice(at, at + step)
        deque(map(_memmove, here[part], there[part], sizes[part]), 0)
        at = min(at + step, len(sizes))
    return at


_memmove: Any = ctypes.memmove


def _buffer(nbytes: int) -> NDArray[np.uint8]:
    """This thread's."""
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < nbytes:
        buffer = _local.buffer = np.empty(nbytes, np.uint8)
    return buffer[:nbytes]
