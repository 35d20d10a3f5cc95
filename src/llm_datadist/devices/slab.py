"""The word slab: 64-bit words that peers read in our memory to see whether something still holds.

Strategy: chunks of private anonymous memory, never unmapped and never moved; a word that no longer holds
is zero, and its slot may serve again, because values are random and no old reader can match a new one.
Invariants: a word changes by one aligned store; 0 is never a value; a forked child sees zeros
(MADV_WIPEONFORK) and writes nothing, so that it can neither pass for its parent nor revive a word.
Threads: every method may be called from any thread. A store is followed by a release and an acquire of
the lock before the method returns, so that no later write of the caller can be seen before it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import Any

_CHUNK_NBYTES = 64 << 10
_WORD_NBYTES = 8
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14; without it the pid guard is what is left


class Slab:
    """Words of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._free: list[int] = []
        self._used: set[int] = set()

    def allocate(self, value: int) -> int:
        """A slot that holds ``value``, random and not 0; returns its address, a multiple of 8.

        Raises:
            RuntimeError: In a forked child.
            MemoryError: The system gives no memory.
        """
        self._refuse_child()
        _check(value)
        with self._lock:
            if not self._free:
                self._free = _map_chunk()
            address = self._free.pop()
            self._used.add(address)
            ctypes.c_uint64.from_address(address).value = value
        self._order_stores()
        return address

    def store(self, address: int, value: int) -> None:
        """Changes the word of a slot in use.

        Raises:
            RuntimeError: In a forked child.
            ValueError: Not a slot in use.
        """
        self._refuse_child()
        _check(value)
        with self._lock:
            self._check_used(address)
            ctypes.c_uint64.from_address(address).value = value
        self._order_stores()

    def load(self, address: int) -> int:
        """The word of a slot in use, 0 in a forked child.

        Raises:
            ValueError: Not a slot in use.
        """
        if os.getpid() != self._pid:  # before the lock: another thread may have held it at the fork
            return 0
        with self._lock:
            self._check_used(address)
            return ctypes.c_uint64.from_address(address).value

    def release(self, address: int) -> None:
        """Zeroes the word and gives the slot back; nothing for a slot not in use, or in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if address not in self._used:
                return
            ctypes.c_uint64.from_address(address).value = 0
            self._used.remove(address)
            self._free.append(address)
        self._order_stores()

    def clear(self) -> None:
        """Zeroes every word and gives all slots back. In a forked child nothing happens."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for address in self._used:
                ctypes.c_uint64.from_address(address).value = 0
            self._free.extend(self._used)
            self._used.clear()
        self._order_stores()

    def _check_used(self, address: int) -> None:
        if address not in self._used:
            raise ValueError(f"{address:#x} is not a word of this slab in use")

    def _order_stores(self) -> None:
        with self._lock:
            pass

    def _refuse_child(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the word slab belongs to the process that forked this one")


def _check(value: int) -> None:
    if not 0 < value < 1 << 64:
        raise ValueError(f"a word's value lies in [1, 2**64), not {value}")


def _map_chunk() -> list[int]:
    """Addresses of the words of a new chunk, which stays mapped until the process ends."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, _CHUNK_NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        raise MemoryError(f"no memory for a chunk of words: {os.strerror(ctypes.get_errno())}")
    libc.madvise(base, _CHUNK_NBYTES, _WIPE_ON_FORK)
    return list(range(base + _CHUNK_NBYTES - _WORD_NBYTES, base - _WORD_NBYTES, -_WORD_NBYTES))
