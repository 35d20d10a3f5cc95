"""What peers hold of our caches and until when. Pure; called under the engine's lock.

A lease lets one peer read one cache. It ends when the peer releases it, at its deadline, with its link,
or when the owner cuts it off; its word in the slab is cleared first, so a reader that is late notices.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist.status import OutOfMemoryError

K = TypeVar("K", bytes, int)
_MIN_PURGE = 64  # ended leases that may stay in the heap before it is rebuilt


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """One peer's hold on one cache.

    Attributes:
        holder: The token of its link.
        expires_at: Seconds of the caller's clock.
        key: The request key that a complete read releases.
        giver: What of ours has given it, if that ends it.
    """

    lease_id: int
    holder: bytes
    record: Record
    word: GenerationWord
    expires_at: float
    key: KeyName | None = None
    giver: object = None


@dataclass(slots=True)
class Leases:
    """All leases that are out.

    Attributes:
        new_word: Makes a word with a random value.
        clear_word: Clears one and gives its slot back.
    """

    new_word: Callable[[], GenerationWord]
    clear_word: Callable[[GenerationWord], None]
    _out: dict[int, Lease] = field(default_factory=dict)
    _by_holder: defaultdict[bytes, dict[int, Lease]] = field(default_factory=lambda: defaultdict(dict))
    _by_cache: defaultdict[int, dict[int, Lease]] = field(default_factory=lambda: defaultdict(dict))
    # Those with an end: pulls of the holder, not our pushes.
    _asked: Counter[bytes] = field(default_factory=Counter)
    _ends: list[tuple[float, int]] = field(default_factory=list)  # a heap, of ended ones as well
    _next_id: int = 1

    def grant(
        self,
        holder: bytes,
        record: Record,
        expires_at: float,
        key: KeyName | None = None,
        giver: object = None,
    ) -> Lease:
        """Gives ``holder`` a lease on a cache."""
        lease = Lease(self._next_id, holder, record, self.new_word(), expires_at, key, giver)
        self._next_id += 1
        self._out[lease.lease_id] = lease
        self._by_holder[holder][lease.lease_id] = lease
        self._by_cache[record.cache_id][lease.lease_id] = lease
        if expires_at < math.inf:
            self._asked[holder] += 1
            heapq.heappush(self._ends, (expires_at, lease.lease_id))
        return lease

    def check_room(self, holder: bytes, most: int) -> None:
        """Whether ``holder`` may ask for one more.

        Raises:
            OutOfMemoryError: It has as many already.
        """
        if self._asked[holder] >= most:
            raise OutOfMemoryError(
                f"{most} reads of this link are under way there, which is the most; end some first"
            )

    def get(self, lease_id: int, holder: bytes, now: float) -> Lease | None:
        """The lease with this id, if it is this holder's and its time is not over."""
        lease = self._out.get(lease_id)
        return lease if lease is not None and lease.holder == holder and now < lease.expires_at else None

    def end(self, lease: Lease) -> bool:
        """Ends a lease; False if it had ended."""
        if self._out.pop(lease.lease_id, None) is None:
            return False
        _drop(self._by_holder, lease.holder, lease.lease_id)
        _drop(self._by_cache, lease.record.cache_id, lease.lease_id)
        if lease.expires_at < math.inf:
            self._asked[lease.holder] -= 1
            if not self._asked[lease.holder]:
                del self._asked[lease.holder]
        self.clear_word(lease.word)
        if len(self._ends) > 2 * len(self._out) + _MIN_PURGE:
            self._ends = [entry for entry in self._ends if entry[1] in self._out]
            heapq.heapify(self._ends)
        return True

    def expire(self, now: float) -> None:
        """Ends all whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            lease = self._out.get(heapq.heappop(self._ends)[1])
            if lease is not None:
                self.end(lease)

    def holds(self, lease: Lease) -> bool:
        """Whether it is still out."""
        return self._out.get(lease.lease_id) is lease

    def of_giver(self, giver: object) -> list[Lease]:
        """What one call of ours has given."""
        return [x for x in self._out.values() if x.giver is giver]

    def all(self) -> list[Lease]:
        """What all peers hold."""
        return list(self._out.values())

    def of_holder(self, holder: bytes) -> list[Lease]:
        """What one peer holds."""
        return list(self._by_holder.get(holder, {}).values())

    def of_cache(self, cache_id: int) -> list[Lease]:
        """Who holds a cache."""
        return list(self._by_cache.get(cache_id, {}).values())


def _drop(index: defaultdict[K, dict[int, Lease]], key: K, lease_id: int) -> None:
    leases = index[key]
    del leases[lease_id]
    if not leases:
        del index[key]
