"""Memory as callers own it: anonymous mappings to fill, to unmap and to put at an address of choice."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
FILL = 0xA5
_MAP_FIXED_NOREPLACE = 0x100000
_TABLE = 1_000_003  # prime: blocks of a round size never repeat within it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory that is mapped now."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Mapping:
    """An anonymous private mapping; unmapped by ``close``, never by the collector."""

    def __init__(self, nbytes: int, address: int = 0) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_FIXED_NOREPLACE if address else 0)
        got = _libc.mmap(address or None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if got in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap of {self.nbytes} bytes at {address:#x}")
        self.address: int = got

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return bytes_at(self.address + offset, nbytes)

    def close(self) -> None:
        if self.address and _libc.munmap(self.address, self.nbytes):
            raise OSError(ctypes.get_errno(), f"munmap of {self.address:#x}")
        self.address = 0


@lru_cache(maxsize=4)
def _table(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, _TABLE, dtype=np.uint8)


def pattern(seed: int, tensor: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that depend on cache (seed), tensor and offset."""
    table, out = _table(seed), np.empty(nbytes, np.uint8)
    start, done = (seed * 7919 + tensor * 104_729) % _TABLE, 0
    while done < nbytes:
        piece = table[start : start + nbytes - done]
        out[done : done + len(piece)] = piece
        start, done = 0, done + len(piece)
    return out
