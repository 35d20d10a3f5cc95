"""What peers hold of our caches and until when. Pure; called under the engine's lock.

A lease lets one peer read one cache. It ends when the peer releases it, at its deadline, with its link,
or when the owner cuts it off; its word in the slab is cleared first, so a reader that is late notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_datadist._core.registry import GenerationWord, KeyName, Record


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
        return lease

    def get(self, lease_id: int, holder: bytes, now: float) -> Lease | None:
        """The lease with this id, if it is this holder's and its time is not over."""
        lease = self._out.get(lease_id)
        return lease if lease is not None and lease.holder == holder and now < lease.expires_at else None

    def end(self, lease: Lease) -> bool:
        """Ends a lease; False if it had ended."""
        if self._out.pop(lease.lease_id, None) is None:
            return False
        self.clear_word(lease.word)
        return True

    def expire(self, now: float) -> None:
        """Ends all whose time is over."""
        for lease in [x for x in self._out.values() if x.expires_at <= now]:
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
        return [x for x in self._out.values() if x.holder == holder]

    def of_cache(self, cache_id: int) -> list[Lease]:
        """Who holds a cache."""
        return [x for x in self._out.values() if x.record.cache_id == cache_id]
