"""Reads of a few bytes with transport ``nixl``: words, and the proof of who is read."""

from __future__ import annotations

import threading
import time

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.transports.nixl_session import Source
from llm_datadist.transports.nixl_use import Use

_SLOTS = 256
_SLEEP_S = 0.001


class Scratch:
    """Places for small reads, one for each that is under way."""

    def __init__(self) -> None:
        self._memory = np.zeros(_SLOTS * PROOF_NBYTES, dtype=np.uint8)
        self._start = int(self._memory.ctypes.data)
        self.rows = np.array([[self._start, self._start + len(self._memory)]], dtype=np.uint64)
        self._lock = threading.Lock()
        self._holders: list[Use | None] = [None] * _SLOTS

    def take(self, use: Use) -> int:
        """A place, until this use is over; waits for one."""
        while True:
            with self._lock:
                for i, holder in enumerate(self._holders):
                    if holder is None or holder.is_settled:
                        self._holders[i] = use
                        return self._start + i * PROOF_NBYTES
            time.sleep(_SLEEP_S)

    def content(self, slot: int, nbytes: int) -> bytes:
        """What is there."""
        return self._memory[slot - self._start :][:nbytes].tobytes()


class Small:
    """A ``Task`` of a few bytes."""

    memory = "host"

    def __init__(self, sources: tuple[Source, ...], rows: U64, there: int, here: int, nbytes: int) -> None:
        self.sources = sources
        self.rows = rows
        self.nbytes = nbytes
        self._pieces = tuple(np.array([n], dtype=np.uint64) for n in (there, here, nbytes))

    def pieces(self, at: int, max_nbytes: int) -> tuple[U64, U64, U64]:
        """See ``Task``."""
        there, here, nbytes = self._pieces
        return there, here, nbytes

    def hole(self, here: U64, nbytes: U64) -> int | None:
        """See ``Task``."""
        return None

    def unwritable(self, at: int, max_nbytes: int) -> int | None:
        """See ``Task``."""
        return None
