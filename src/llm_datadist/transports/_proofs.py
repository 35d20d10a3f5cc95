"""Where a process shows the proofs of its handshakes to those who read its memory: a page for nothing else.

Invariants: nothing that a peer has sent is ever written here, only hashes that this process made itself; a
forked child has zeros there and cannot pass for its parent.
Threads: every method from any.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from llm_datadist._core import limits
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.devices.mapping import WIPE_ON_FORK
from llm_datadist.transports.seam import TransportUnavailable


class ProofPage:
    """Slots of ``PROOF_NBYTES``.

    Attributes:
        address: Of slot 0.
        nbytes: Of all.
    """

    def __init__(self) -> None:
        self.nbytes = limits.PROOFS * PROOF_NBYTES
        self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # Linux < 4.14
            self._memory.madvise(WIPE_ON_FORK)
        self.address = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._never_used = 0
        self._slots: dict[bytes, int] = {}

    def show(self, proof: bytes) -> int:
        """The slot that holds it from now on.

        Raises:
            TransportUnavailable: None is free.
        """
        if len(proof) != PROOF_NBYTES:
            raise ValueError(f"a proof has {PROOF_NBYTES} bytes, not {len(proof)}")
        with self._lock:
            slot = self._slots.get(proof)
            if slot is None:
                slot = self._slots[proof] = self._take()
                self._write(slot, proof)
            return slot

    def hide(self, proof: bytes) -> None:
        """Takes it away; nothing for one that is not there."""
        with self._lock:
            slot = self._slots.pop(proof, None)
            if slot is not None:
                self._write(slot, bytes(PROOF_NBYTES))
                self._free.append(slot)

    def close(self) -> None:
        """Unmaps it."""
        with self._lock:
            self._free, self._never_used = [], limits.PROOFS
            self._slots.clear()
            self._memory.close()

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._never_used == limits.PROOFS:
            raise TransportUnavailable(
                f"{limits.PROOFS} handshakes are under way, which is the most, or this is closed"
            )
        self._never_used += 1
        return self._never_used - 1

    def _write(self, slot: int, content: bytes) -> None:
        at = slot * PROOF_NBYTES
        self._memory[at : at + PROOF_NBYTES] = content
