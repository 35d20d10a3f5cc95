"""Memory of a test in a pool of its engine, so that transport ``shm`` reaches it.

Strategy: ``actors.options`` gives an engine whose backend is ``shm`` a host pool, of a size that no test asks for.
It is the test's alone: no cache is allocated there, and caches are registered over it as over any memory, with the
same ids; ``MemPoolConfig`` stays free for tests of allocated caches.
Memory given back is overwritten, so that a late read shows. It is unmapped with the engine, not before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.memory import PAGE, bytes_at

ARENA_NBYTES = (3 << 30) + (3 << 16)  # sparse
ARENA = f'{{"memory_size": {ARENA_NBYTES}}}'
FREED = 0xEE


class Piece:
    """Memory of an arena, in the place of a ``Mapping``."""

    def __init__(self, arena: Arena, address: int, nbytes: int) -> None:
        self._arena = arena
        self.address = address
        self.nbytes = nbytes

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return bytes_at(self.address + offset, nbytes)

    def close(self) -> None:
        """Gives it back, unless it has gone with its engine."""
        if self.address and self._arena.alive:
            self.view(0, self.nbytes)[:] = FREED
            self._arena.give_back(self)
        self.address = 0


class Arena:
    """The pool of one life of an engine: first fit, pieces of whole pages."""

    def __init__(self, dist: Any, address: int) -> None:
        self._dist = dist
        self._engine = dist._engine
        self._free = [(address, ARENA_NBYTES)]

    @property
    def alive(self) -> bool:
        """Whether the memory is still there."""
        return self._engine is not None and self._dist._engine is self._engine

    def take(self, nbytes: int) -> Piece:
        """A piece of it.

        Raises:
            MemoryError: It does not fit.
        """
        nbytes = -(-nbytes // PAGE) * PAGE
        for at, (address, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[at] = (address + nbytes, room - nbytes)
                return Piece(self, address, nbytes)
        raise MemoryError(f"{nbytes} bytes do not fit into what is free of the test's pool: {self._free}")

    def give_back(self, piece: Piece) -> None:
        """The end of a ``take``."""
        self._free.insert(0, (piece.address, piece.nbytes))


def arena_of(dist: Any) -> Arena | None:
    """A new arena on the pool of an initialised engine; None if it has none."""
    engine = getattr(dist, "_engine", None)
    if engine is None:
        return None
    found = [area.address for area in engine._state.pools.areas if area.nbytes == ARENA_NBYTES]
    return Arena(dist, found[0]) if found else None
