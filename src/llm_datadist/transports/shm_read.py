"""One read of transport ``shm``: a plan copied out of the peer's memory, which is mapped here.

Strategy: source addresses are moved into the mapping once, per tensor; then runs are copied one by one
where they are long, as units where they are not (``shm_copy``), and by the kernel where neither helps: odd
sizes, or a busy interpreter. Of long runs one thread copies one after the other, and the kernel for the
other threads: two would wait for each other's GIL, run by run.
Invariant: a copy in user space writes only where this process may write: into areas of its own, or where
its table of mappings shows anonymous memory. Anywhere else, files included (cut short they are SIGBUS), the
kernel copies, for which a bad address is an answer; where it may not (seccomp), the destination is refused.
"""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np

from llm_datadist._core.segments import Segments, matched
from llm_datadist.devices.cpu import first_not_anonymous, is_writable
from llm_datadist.transports import _libc, shm_copy
from llm_datadist.transports._one_sided import CALL_NBYTES, OneSidedRead, unwritable
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.shm_areas import Areas, Box
from llm_datadist.transports.shm_memory import PeerMemory

# Measured: the copy of a unit passes through a buffer, that of a run costs a call, and between threads a wait
# for the GIL; they are even at about 20 KiB, and at 60 KiB where several threads must copy in this way.
_LONG_RUN_NBYTES = 24 << 10
_LONG_RUN_WITHOUT_KERNEL_NBYTES = 64 << 10
_PATIENT_NBYTES = 4 << 20
_BATCH_RUNS = 4096
# Reading the table of mappings takes as long as the faster way saves on this much.
CHECKED_NBYTES = 16 << 20


class ShmRead(OneSidedRead):
    """A read under way.

    Args:
        memory: The peer's.
        own: Areas of ours, which may be written.
        by_kernel: Whether this process may read itself with ``process_vm_readv``.
        movers: Who helps.
        plan: What to read.
    """

    __slots__ = (
        "_by_kernel", "_from", "_in_kernel", "_memory", "_own", "_patient", "_to", "_unit", "_walking",
    )  # fmt: skip

    def __init__(
        self, memory: PeerMemory, own: Areas, by_kernel: bool, movers: Movers, plan: Segments
    ) -> None:
        super().__init__(memory, movers, plan)
        self._memory = memory
        self._own = own
        self._by_kernel = by_kernel
        self._in_kernel = False  # all the rest goes that way
        self._unit = 0  # bytes of a unit; 0: runs as they are
        self._walking = threading.Lock()  # held by the one thread that copies long runs
        self._patient = False  # in user space, however busy the interpreter
        self._from: shm_copy.Units
        self._to: shm_copy.Units

    def _begin(self, nbytes: int) -> int:
        if self._must_stop():
            return 0
        run = self._one_run()
        if run is not None:
            return self._copy_one(*run, nbytes)
        box = Box.of(self._source)
        shifts = self._memory.settle().shifts_of(self._source, box)
        if shifts is None:
            self._note(self._memory.beyond(box.low))
            return 0
        self._source = self._source.moved(shifts)
        self._choose(nbytes, Box.of(self._source))
        return 0

    def _copy_one(self, there: int, here: int, nbytes: int) -> int:
        shift = self._memory.settle().shift_at(there, nbytes)
        if shift is None:
            self._note(self._memory.beyond(there))
            return 0
        there += shift
        if self._own.shift_at(here, nbytes) is not None:
            ctypes.memmove(here, there, nbytes)
            return nbytes
        self._source = self._source.moved(np.array([shift % (1 << 64)], dtype=np.uint64))
        self._choose(nbytes, Box.of(self._source))
        if self._fault is not None or not self._by_kernel:
            return 0
        return max(0, _libc.read_one(os.getpid(), here, there, nbytes))

    # ---- how -------------------------------------------------------------------------------------

    def _choose(self, nbytes: int, from_box: Box) -> None:
        """Whether to copy here or in the kernel, and in what pieces; or a fault."""
        source, destination = self._source, self._destination
        box = Box.of(destination)
        if self._own.shifts_of(destination, box) is None and not self._may_write(nbytes, box):
            return
        runs = max(len(source.bases) * len(source.offsets), len(destination.bases) * len(destination.offsets))
        crowded = not self._by_kernel and self._moves_together(nbytes)
        if nbytes >= runs * (_LONG_RUN_WITHOUT_KERNEL_NBYTES if crowded else _LONG_RUN_NBYTES):
            return
        unit = shm_copy.unit_nbytes((source, from_box), (destination, box))
        if unit < shm_copy.MIN_UNIT_NBYTES or source.row_nbytes > unit * shm_copy.MAX_ROW_UNITS:
            self._in_kernel = self._by_kernel
            return
        self._unit = self._grain = unit
        self._from = shm_copy.Units(source, from_box, unit)
        self._to = shm_copy.Units(destination, box, unit)

    def _may_write(self, nbytes: int, box: Box) -> bool:
        """Whether a destination in foreign memory may be written from here; else the kernel does, or a fault."""
        if self._by_kernel and nbytes <= CHECKED_NBYTES:
            self._in_kernel = True
            return False
        if first_not_anonymous(self._destination.bases + np.uint64(box.offset), box.width) is None:
            return True
        if self._by_kernel:  # the hole may be one that the plan spares; if not, this finds the very byte
            self._in_kernel = True
            return False
        return self._may_write_each_run()

    def _may_write_each_run(self) -> bool:
        destination = self._destination
        for base in destination.bases.tolist():
            starts = destination.offsets + np.uint64(base)
            bad = first_not_anonymous(starts, destination.lengths)
            if bad is not None:
                self._note(_unsafe(int(starts[bad]), int(destination.lengths[bad])))
                return False
        return True

    # ---- moving ----------------------------------------------------------------------------------

    def _move(self, at: int, stop: int) -> int:
        while at < stop and not self._must_stop():
            if self._in_kernel:
                return self._move_by_kernel(os.getpid(), at, stop)
            if self._unit:
                at += self._copy_units(at, stop)
            elif not self._by_kernel:
                at += self._copy_runs(at, stop)
            elif self._walking.acquire(blocking=False):
                try:
                    at += self._copy_runs(at, stop)
                finally:
                    self._walking.release()
            else:
                return self._move_by_kernel(os.getpid(), at, stop)
        return at

    def _copy_units(self, at: int, stop: int) -> int:
        unit = self._unit
        first, count = at // unit, min(CALL_NBYTES, stop - at) // unit
        most = self._chunk_nbytes() // unit
        pace = shm_copy.Pace(most, most, self._must_stop, self._patient)
        si, di = self._from.indices(first, first + count), self._to.indices(first, first + count)
        done = shm_copy.copy_units(self._from, si, self._to, di, pace)
        self._judge(pace)
        return done * unit

    def _copy_runs(self, at: int, stop: int) -> int:
        room = min(CALL_NBYTES, stop - at)
        source, _ = self._source.take_pairs(at, room, _BATCH_RUNS)
        destination, _ = self._destination.take_pairs(at, room, _BATCH_RUNS)
        there, here, nbytes = matched(source, destination)
        most = self._chunk_nbytes() // (int(nbytes.sum()) // len(nbytes))
        pace = shm_copy.Pace(most, 1, self._must_stop, self._patient)
        done = shm_copy.copy_runs(there, here, nbytes, pace)
        self._judge(pace)
        return int(nbytes[:done].sum())

    def _chunk_nbytes(self) -> int:
        return _PATIENT_NBYTES if self._patient else shm_copy.CHUNK_NBYTES

    def _judge(self, pace: shm_copy.Pace) -> None:
        """Whether to go on in the same way."""
        if pace.slow:
            self._in_kernel = self._by_kernel
            self._patient = not self._by_kernel


def _unsafe(address: int, nbytes: int) -> Fault:
    """Why nothing is copied to ``address`` of ours where the kernel may not do it."""
    if not is_writable(address, nbytes):
        return unwritable(address)
    return Fault(
        FaultKind.DESTINATION,
        f"address {address:#x} of this process is mapped from a file or shared, which can be cut short under a copy; "
        "only the kernel could copy to it, and process_vm_readv is refused here: allow it, or use anonymous memory",
    )
