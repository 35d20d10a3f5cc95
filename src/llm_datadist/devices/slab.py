"""The word slab: 64-bit words that peers read in our memory to see whether something still holds.

Strategy: one sparse area, never unmapped and never moved; a word that no longer holds is zero, and its
slot may serve again, because values are random and no old reader can match a new one. The area is a
sealed memfd, so that readers on this host can be given it; private memory where there is no memfd.
Invariants: a word changes by one aligned store; 0 is never a value; a forked child has nothing there
(MADV_DONTFORK; zeros in private memory) and writes nothing, so that it can neither pass for its parent
nor revive a word.
Threads: every method may be called from any thread. A store is followed by a release and an acquire of
the lock before the method returns, so that no later write of the caller can be seen before it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

from llm_datadist._shortages import is_shortage
from llm_datadist.devices.mapping import (
    NO_RESERVE,
    PRIVATE,
    READ_WRITE,
    WIPE_ON_FORK,
    advise,
    map_memory,
    unmap,
)
from llm_datadist.devices.shared_memory import NotSharable, SharedArea, create_memfd, seal

# One word for each cache, key and lease of a life. It takes address space alone until words are used.
_AREA_NBYTES = 64 << 20
_WORD_NBYTES = 8


class Slab:
    """Words of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._free: list[int] = []
        self._used: set[int] = set()
        self._address = 0
        self._fd = -1
        self._unsealed = ""
        self._map()
        self._never_used = self._address
        # Closes the descriptor at the latest with the slab; the memory stays.
        self._close = weakref.finalize(self, _close, self._fd)

    def allocate(self, value: int) -> int:
        """A slot that holds ``value``, random and not 0; returns its address, a multiple of 8.

        Raises:
            RuntimeError: In a forked child.
            MemoryError: All words of the area are in use.
        """
        self._refuse_child()
        _check(value)
        with self._lock:
            address = self._free.pop() if self._free else self._extend()
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

    @property
    def bounds(self) -> tuple[int, int]:
        """(address, nbytes) of what holds all words, now and later."""
        return self._address, _AREA_NBYTES

    @property
    def area(self) -> SharedArea:
        """What a peer may be given, until ``close_descriptor``.

        Raises:
            NotSharable: Nothing; the text says why.
        """
        if self._unsealed:
            raise NotSharable(self._unsealed)
        return SharedArea(self._address, _AREA_NBYTES, self._fd)

    def close_descriptor(self) -> None:
        """Ends the sharing with new readers; the words stay. Idempotent; all that a forked child may call."""
        self._close()

    def discard(self) -> None:
        """Unmaps it after all: no peer has been told of it, and no word is in use. Idempotent."""
        address, self._address = self._address, 0
        if address:
            unmap(address, _AREA_NBYTES)

    def _map(self) -> None:
        """Takes the area, shared if it can be and private if not.

        Raises:
            OSError: Not now: what is short may be there again later, and then it would be shared.
        """
        try:
            self._map_shared()
        except OSError as exc:
            if is_shortage(exc):
                raise
            self._unsealed = f"this system gives no memory that can be shared: {exc}"
            self._address = map_memory(None, _AREA_NBYTES, READ_WRITE, PRIVATE | NO_RESERVE, -1)
            with contextlib.suppress(OSError):
                advise(self._address, _AREA_NBYTES, WIPE_ON_FORK)

    def _map_shared(self) -> None:
        self._fd = create_memfd("llm-datadist-words", _AREA_NBYTES)
        try:
            self._address = map_memory(None, _AREA_NBYTES, READ_WRITE, mmap.MAP_SHARED, self._fd)
            advise(self._address, _AREA_NBYTES, mmap.MADV_DONTFORK)
            self._unsealed = seal(self._fd)
        except BaseException:
            self.discard()
            os.close(self._fd)
            self._fd = -1
            raise

    def _extend(self) -> int:
        """The next word that has never been used."""
        if self._never_used == self._address + _AREA_NBYTES:
            raise MemoryError(
                f"all {_AREA_NBYTES // _WORD_NBYTES} words are in use; unregister caches or keys"
            )
        self._never_used += _WORD_NBYTES
        return self._never_used - _WORD_NBYTES

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


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
