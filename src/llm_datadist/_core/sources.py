"""Which caches of one side of a link the other may read for its offers. Pure; called under the engine's lock.

An offer names a cache that was published on that link, and never addresses. Both sides keep the same: what is
published moves to the end when it is used, and the first goes when there is too much of it, so that what a
peer makes us hold is bounded, and nothing need be said when it goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llm_datadist._core import limits

T = TypeVar("T")

SOURCES_NBYTES = limits.SOURCES_NBYTES
ENTRY_NBYTES = 1024  # what each costs besides


@dataclass(slots=True)
class Sources(Generic[T]):
    """Those of one side. ``T``: what is kept of one: its word at the owner, its description at the reader.

    Attributes:
        nbytes: What all of them count.
    """

    nbytes: int = 0
    _kept: dict[int, tuple[T, int]] = field(default_factory=dict)

    def put(self, cache_id: int, kept: T, nbytes: int) -> None:
        """It was published, with so many bytes of addresses and the like. The last one has room in any case."""
        self.drop(cache_id)
        self.nbytes += (
            nbytes + ENTRY_NBYTES
        )  # first: an interrupted caller may count too much, never too little
        self._kept[cache_id] = kept, nbytes + ENTRY_NBYTES
        while self.nbytes > SOURCES_NBYTES and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))

    def use(self, cache_id: int) -> T | None:
        """What is kept of it; None: it is not published."""
        found = self._kept.pop(cache_id, None)
        if found is None:
            return None
        self._kept[cache_id] = found
        return found[0]

    def drop(self, cache_id: int) -> bool:
        """It is published no more; whether it was."""
        found = self._kept.pop(cache_id, None)
        if found is not None:
            self.nbytes -= found[1]
        return found is not None
