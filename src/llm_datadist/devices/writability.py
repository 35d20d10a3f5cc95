"""Whether memory of ours may be written, asked before the first byte of a transfer; no byte is changed by it.

Strategy: the kernel says which mapping an address is in and what it allows (PROCMAP_QUERY, Linux 6.11): half a
microsecond for a mapping of any size, where the table of mappings takes milliseconds in a large process. What a file
was cut short of cannot be written either: as it is cut at its end, the last page in question tells, which is made
ready for writing (MADV_POPULATE_WRITE, Linux 5.14). A "no" is looked up in the table, run by run: a plan may spare
a hole.
On an older kernel the first and the last page of each tensor are made ready, so a hole between them is met by the
copy itself; where neither is to be had, the table is read each time.
Threads: any. Calls keep the GIL: beside a thread that runs Python, giving it away costs 5 ms each time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from llm_datadist._core.segments import U64, Extents
from llm_datadist.devices.cpu import first_unwritable_run
from llm_datadist.devices.mapping import POPULATE_WRITE

_QUERY = 0xC0686611  # PROCMAP_QUERY: _IOWR('f', 17, 104 bytes)
_QUERY_NBYTES = 104
_WRITABLE = 0x02
_Words = ctypes.c_uint64 * (_QUERY_NBYTES // 8)
_START, _END, _INODE = 3, 4, 8  # of those
_MOST_ASKED = 4096  # tensors; of more the table is read
_MOST_MADE_READY = 64
_FEW_RUNS = 64  # so many are looked through faster without NumPy

_ioctl: Any = ctypes.PyDLL(None, use_errno=True).ioctl
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_ioctl_again: Any = ctypes.PyDLL(None)["ioctl"]  # without types: for arguments that are made once, and fit
_madvise: Any = ctypes.PyDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Unsure(Exception):  # noqa: N818 - an answer
    """The table of mappings must tell."""


class Writability:
    """Of this process. Not opened, or without a descriptor left, it takes the way of older kernels."""

    def __init__(self) -> None:
        self.fd = -1

    def open(self) -> None:
        """Takes a descriptor, if there is one and the kernel has an answer."""
        words = _Words(_QUERY_NBYTES, _WRITABLE)
        words[2] = ctypes.addressof(words)
        try:
            self.fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        if _ioctl(self.fd, _QUERY, ctypes.addressof(words)):
            self.close()

    def close(self) -> None:
        """Gives it back; to be called in a forked child as well, where it tells of the parent. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def first_unwritable(self, destination: Extents) -> tuple[int, int] | None:
        """The first tensor, by position, with a run that is not wholly there to be written, and an address of that."""
        if not destination.nbytes:
            return None
        low, high = _box(destination)
        bases = destination.bases.tolist()
        try:
            if self.fd >= 0 and len(bases) <= _MOST_ASKED:
                return self._ask(bases, low, high)
            return _make_ends_ready(bases, low, high, len(destination.offsets))
        except _Unsure:
            return first_unwritable_run(destination)

    def again(self, bases: U64, nbytes: int, *, sealed: bool) -> Again:
        """Prepares the question about these tensors.

        Args:
            bases: Where they are.
            nbytes: Of each.
            sealed: Nobody can cut short what is behind them.
        """
        return Again(self, bases, nbytes, sealed)

    def _ask(self, bases: list[int], low: int, high: int) -> tuple[int, int] | None:
        start = end = used = row = 0  # a mapping, how far it is written if a file is behind it, and by whom
        for i, base in enumerate(bases):
            at, stop = base + low, base + high
            while at < stop:
                if not start <= at < end:
                    if used and _is_cut_short(used - 1):
                        return row, used - 1
                    start, end, of_file = self._mapping_at(at)
                    used = 0
                if of_file and min(stop, end) > used:
                    used, row = min(stop, end), i
                at = end
        return (row, used - 1) if used and _is_cut_short(used - 1) else None

    def _mapping_at(self, address: int) -> tuple[int, int, bool]:
        """Start and end of the mapping there, if it may be written, and whether a file is behind it.

        Raises:
            _Unsure: There is none, or the kernel does not say.
        """
        words = _Words(_QUERY_NBYTES, _WRITABLE, address)
        if _ioctl(self.fd, _QUERY, ctypes.addressof(words)):
            raise _Unsure
        return words[_START], words[_END], words[_INODE] != 0

    def ranges(self, bases: U64, nbytes: int) -> list[tuple[int, int]]:
        """All that these tensors cover and what is between them, a range for each mapping, as these are now."""
        ranges: list[tuple[int, int]] = []
        start = end = 0
        for base in np.sort(bases).tolist():
            at, stop = base, base + nbytes
            while at < stop:
                if start <= at < end:
                    ranges[-1] = ranges[-1][0], min(end, max(stop, ranges[-1][1]))
                else:
                    start, end, _ = self._mapping_at(at)
                    ranges.append((at, min(end, stop)))
                at = end
        return ranges


class Again:
    """The question about the tensors of one cache, which is repeated."""

    __slots__ = ("_asked", "_bases", "_owner", "_sealed")

    def __init__(self, owner: Writability, bases: U64, nbytes: int, sealed: bool) -> None:
        self._owner = owner
        self._bases = bases
        self._sealed = sealed
        self._asked: list[tuple[Callable[[], int], Any, int]] | None = None
        try:
            ranges = owner.ranges(bases, nbytes) if owner.fd >= 0 else []
        except _Unsure:
            return
        asked: list[tuple[Callable[[], int], Any, int]] = []
        for start, end in ranges:
            # The answer comes behind the question, which stays.
            words = _Words(_QUERY_NBYTES, _WRITABLE, start)
            ask = partial(_ioctl_again, ctypes.c_int(owner.fd), ctypes.c_ulong(_QUERY), words)
            asked.append((ask, words, end))
        self._asked = asked

    def all_writable(self) -> bool:
        """Whether all of all of them may be written. False: perhaps they may."""
        asked = self._asked
        if not asked or self._owner.fd < 0:
            return False
        for ask, words, end in asked:  # noqa: SIM110 - faster
            # Of two threads at once both may see the later answer, which is as good.
            if ask() or words[_END] < end or (words[_INODE] and not self._sealed):
                return False
        return True

    def unit_writable(self, here: int, nbytes: int) -> bool:
        """Whether ``nbytes`` from byte ``here`` of each of them may be written, if not all of all of them may."""
        lengths = np.array((nbytes,), dtype=np.uint64)
        offsets = np.array((here,), dtype=np.uint64)
        return self._owner.first_unwritable(Extents(self._bases, offsets, lengths, lengths, nbytes)) is None


def _box(extents: Extents) -> tuple[int, int]:
    """Where what is written of each tensor begins and ends."""
    offsets, lengths = extents.offsets, extents.lengths
    if len(offsets) == 1:
        low = offsets.item()
        return low, low + extents.row_nbytes
    if len(offsets) <= _FEW_RUNS:
        starts = offsets.tolist()
        return min(starts), max(map(int.__add__, starts, lengths.tolist()))
    return int(offsets.min()), int((offsets + lengths).max())


def _make_ends_ready(bases: list[int], low: int, high: int, runs: int) -> tuple[int, int] | None:
    if len(bases) == runs == 1:
        return None  # the copy finds it: with its first byte, as a rule
    if len(bases) > _MOST_MADE_READY:
        raise _Unsure
    for row, base in enumerate(bases):
        for address in (base + low, base + high - 1):
            why = _errno_of(address)
            if why == errno.EFAULT:
                return row, address
            if why:
                raise _Unsure
    return None


def _is_cut_short(address: int) -> bool:
    """Of a mapping that may be written, whether there is nothing behind it at that address."""
    return _errno_of(address) not in (0, errno.EINVAL)  # EINVAL: of a device, or an older kernel


def _errno_of(address: int) -> int:
    """Why the page of that address cannot be made ready for writing; 0: it is."""
    if not _madvise(address - address % mmap.PAGESIZE, mmap.PAGESIZE, POPULATE_WRITE):
        return 0
    return ctypes.get_errno()
