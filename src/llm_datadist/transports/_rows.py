"""One unit of each of some tensors, again and again: what every such read repeats is made once.

Strategy: the arguments of the call of the kernel, and what they point to, are kept; a read stores where its
units begin and calls. Threads: any; each read takes a set of arguments for itself, or makes one.
"""

from __future__ import annotations

import ctypes

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.transports import _libc
from llm_datadist.transports._one_sided import SPLIT_NBYTES

_FEW = 4  # tensors, for which NumPy takes longer


def fit_one_call(tensors: int, nbytes: int) -> bool:
    """Whether ``nbytes`` of each tensor are so little that one call moves them, which nobody need cut short."""
    return 0 < tensors <= _libc.IOV_MAX and 0 < tensors * nbytes <= SPLIT_NBYTES


class KernelRows:
    """Units of ``nbytes`` at the same place of each tensor, by one ``process_vm_readv`` each time.

    Args:
        pid: Whose memory is read; our own is allowed.
        source: (T,) uint64, the tensors there.
        destination: (T,) uint64, the tensors here.
        nbytes: Bytes of a unit.
    """

    __slots__ = ("_bases", "_idle", "_nbytes", "_pid", "_unit_nbytes")

    def __init__(self, pid: int, source: U64, destination: U64, nbytes: int) -> None:
        self._pid = pid
        self._bases = np.stack((destination, source))
        self._unit_nbytes = nbytes
        self._nbytes = nbytes * len(source)
        self._idle: list[_Call] = []

    def move(self, there: int, here: int) -> bool:
        """Whether all bytes of the units came, which begin ``there`` and ``here`` bytes into the tensors."""
        try:
            call = self._idle.pop()
        except IndexError:
            call = _Call(self._pid, self._bases, self._unit_nbytes)
        done = call.run(there, here)
        self._idle.append(call)
        return done == self._nbytes


class _Call:
    """Arguments for one thread at a time."""

    __slots__ = ("_addresses", "_bases", "_call", "_each", "_offsets", "_offsets_array", "_pairs", "_words")

    def __init__(self, pid: int, bases: U64, nbytes: int) -> None:
        pairs = np.empty((2, bases.shape[1], 2), dtype=np.uint64)
        pairs[:, :, 1] = nbytes
        self._bases = bases
        self._addresses = pairs[:, :, 0]
        self._offsets_array = np.zeros((2, 1), dtype=np.uint64)
        # Stored through ctypes, which is faster and, like the sum, modulo 2**64: bases may be any uint64.
        self._offsets = (ctypes.c_uint64 * 2).from_address(self._offsets_array.ctypes.data)
        self._words = (ctypes.c_uint64 * pairs.size).from_address(pairs.ctypes.data)
        few = bases.T.tolist() if bases.shape[1] <= _FEW else ()
        # Words of the addresses here and there, and the tensors: stored one by one where they are few.
        self._each = tuple((2 * i, 2 * (len(few) + i), to, source) for i, (to, source) in enumerate(few))
        self._pairs = pairs
        self._call = _libc.repeated_read(pid, pairs[0], pairs[1])

    def run(self, there: int, here: int) -> int:
        words = self._words
        for i, j, to, source in self._each:
            words[i] = to + here
            words[j] = source + there
        if not self._each:
            offsets = self._offsets
            offsets[0] = here
            offsets[1] = there
            np.add(self._bases, self._offsets_array, self._addresses)
        return self._call()
