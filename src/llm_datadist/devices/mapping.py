"""``mmap`` and its kin by address: what the ``mmap`` module does not do.

Memory that is never unmapped, memory at an address of choice, and mappings that hold no descriptor.
Threads: all functions may be called from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os

PROT_NONE = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FIXED = 0x10
NO_RESERVE = 0x4000
WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """Maps; returns the address.

    Raises:
        OSError: The system refuses.
    """
    found: int | None = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
    return found


def unmap(address: int, nbytes: int) -> None:
    """Takes a range away."""
    _LIBC.munmap(address, nbytes)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Madvise.

    Raises:
        OSError: The system refuses.
    """
    if _LIBC.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise {advice} of {nbytes} bytes: {os.strerror(number)}")
