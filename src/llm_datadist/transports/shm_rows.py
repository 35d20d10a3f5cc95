"""Transport ``shm``: reads that are repeated, of one unit of each of some tensors.

One tensor, into memory that may be written: a plain copy. All others go by the kernel, in one call for all tensors,
for which a bad address here is an answer; it takes a third of the time that preparing a copy of units takes.
"""

from __future__ import annotations

import ctypes
import os
import time

from llm_datadist._core.segments import U64, Extents
from llm_datadist.transports._rows import KernelRows, fit_one_call
from llm_datadist.transports.seam import OnCut
from llm_datadist.transports.shm_areas import Areas, Box
from llm_datadist.transports.shm_memory import PeerMemory


def shm_rows(
    memory: PeerMemory, own: Areas, by_kernel: bool, source: Extents, destination: Extents, nbytes: int
) -> ShmRows | None:
    """Prepares reads of ``nbytes`` of each of these tensors; None where there is no short way.

    Args:
        memory: The peer's.
        own: Areas of ours, which may be written.
        by_kernel: Whether this process may read itself with ``process_vm_readv``.
        source: All of the peer's tensors.
        destination: All of ours.
        nbytes: Bytes of a unit.
    """
    if not fit_one_call(len(source.bases), nbytes):
        return None
    with memory.hold() as held:
        shifts = memory.settle().shifts_of(source, Box.of(source)) if held else None
    if shifts is None:
        return None
    if len(source.bases) == 1 and own.shifts_of(destination, Box.of(destination)) is not None:
        return ShmRows(memory, Copy(source.bases + shifts, destination.bases, nbytes))
    if not by_kernel:
        return None
    return ShmRows(memory, KernelRows(os.getpid(), source.bases + shifts, destination.bases, nbytes))


class Copy:
    """A unit of one tensor."""

    __slots__ = ("_from", "_nbytes", "_to")

    def __init__(self, source: U64, destination: U64, nbytes: int) -> None:
        self._from = int(source[0])
        self._to = int(destination[0])
        self._nbytes = nbytes

    def move(self, there: int, here: int) -> bool:
        """Always all of it."""
        ctypes.memmove(self._to + here, self._from + there, self._nbytes)
        return True


class ShmRows:
    """See ``seam.Rows``."""

    __slots__ = ("_memory", "_rows")

    def __init__(self, memory: PeerMemory, rows: Copy | KernelRows) -> None:
        self._memory = memory
        self._rows = rows

    def read(self, there: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """One copy, while the memory is held."""
        memory = self._memory
        if time.monotonic() >= deadline:
            return False
        with memory.hold() as held:
            return held and self._rows.move(there, here) and not memory.gone() and not memory.closed
