"""Whether memory of ours is there to be written, asked before each transfer: UCX takes a hole for success.

Strategy: the kernel is asked to have the pages ready for writing (MADV_POPULATE_WRITE, Linux 5.14), which the
copy would have it do anyway; it changes no byte. It takes a microsecond, where the table of mappings takes
milliseconds: NIXL brings a thousand of them. What the kernel refuses, for whatever reason, is looked up there.
Threads: any. Short calls keep the GIL: beside a thread that runs Python, giving it away costs 5 ms each time.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.devices.cpu import first_unwritable
from llm_datadist.devices.mapping import POPULATE_WRITE

_PROCESS_MADVISE = 440  # of all architectures
_THIS_PROCESS = -10_000  # PIDFD_SELF_THREAD, Linux 6.14
_IOV_MAX = 1024
_FEW = 8  # so many calls are cheaper than one for all
_SHORT_NBYTES = 128 << 10  # of which pages are made ready without giving the GIL away
_PAGE = np.uint64(mmap.PAGESIZE)

_ARGUMENTS = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = _ARGUMENTS
_madvise_now: Any = ctypes.PyDLL(None, use_errno=True).madvise
_madvise_now.argtypes = _ARGUMENTS
_syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 6


def first_hole(starts: U64, nbytes: U64) -> int | None:
    """The first of these pieces that is not wholly there to be written: its address."""
    if len(starts) == 1 and _is_ready(starts.item(), nbytes.item()):
        return None
    heads = starts - starts % _PAGE
    sizes = starts + nbytes - heads
    at = _first_refused(heads, sizes) if len(heads) <= _FEW else _first_refused_of_many(heads, sizes)
    if at is None:
        return None
    why = ctypes.get_errno()
    bad = first_unwritable(starts, nbytes)
    if bad is None and why == errno.EFAULT:  # mapped, but its file was cut short: a store there is SIGBUS
        bad = at
    return None if bad is None else int(starts[bad])


def _first_refused(heads: U64, sizes: U64) -> int | None:
    """Which piece the kernel does not make ready; why is in ``errno``."""
    for i, (head, size) in enumerate(zip(heads.tolist(), sizes.tolist(), strict=True)):
        if not _is_ready(head, size):
            return i
    return None


def _is_ready(start: int, nbytes: int) -> bool:
    into = start % mmap.PAGESIZE
    call = _madvise_now if nbytes <= _SHORT_NBYTES else _madvise
    return not call(start - into, nbytes + into, POPULATE_WRITE)


def _first_refused_of_many(heads: U64, sizes: U64) -> int | None:
    """The same by one call for as many as it takes; where it is not to be had, the first is refused."""
    table = np.stack((heads, sizes), axis=1)
    for i in range(0, len(table), _IOV_MAX):
        part = table[i : i + _IOV_MAX]
        ends = part[:, 1].cumsum()
        done = _syscall(_PROCESS_MADVISE, _THIS_PROCESS, int(part.ctypes.data), len(part), POPULATE_WRITE, 0)
        if done < 0:
            return i
        if done < ends[-1]:
            at = i + int(ends.searchsorted(done, side="right"))
            _madvise(int(heads[at]), int(sizes[at]), POPULATE_WRITE)  # says why
            return at
    return None
