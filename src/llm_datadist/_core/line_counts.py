"""How many lines of the log there may be about the peers of one address, and of all. Pure; guarded by its owner."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from llm_datadist._core import limits

K = TypeVar("K", bound=Hashable)

OTHERS = "other addresses"
ALL = "all addresses"


@dataclass(slots=True)
class _Count:
    ends_at: float
    lines: int = 0
    more: int = 0
    last: str = ""

    def leave_out(self, more: int, text: str) -> None:
        self.more += more
        self.last = text


@dataclass(frozen=True, slots=True)
class Left:
    """What was counted and not said, of one address and kind; ``last``: the last of it."""

    address: str
    kind: str
    more: int
    last: str


class LineCounts:
    """The first lines of each minute are said, the others counted.

    Each kind has ``limits.LINES_ENGINE`` of them for all addresses, those that tell what was counted among them.

    Args:
        addresses: For so many they are counted one by one; the rest shares one count.
    """

    def __init__(self, addresses: int = limits.ADDRESSES) -> None:
        self._addresses = addresses
        self._counts: dict[tuple[str, str], _Count] = {}
        self._sums: dict[str, _Count] = {}  # by kind

    def admit(self, address: str, kind: str, most: int, text: str, now: float) -> bool:
        """Whether this line may be said; ``most``: how many of the kind in a minute. Call ``ended`` first."""
        if (address, kind) not in self._counts and len(self._counts) >= self._addresses:
            address = OTHERS
        count = _current(self._counts, (address, kind), now)
        if count.lines >= most:
            count.leave_out(1, text)
        elif self._has_room(kind, 1, text, now):
            count.lines += 1
            return True
        return False

    def ended(self, now: float) -> list[Left]:
        """Forgets the counts whose minute is over; those with something left."""
        over = _take_over(self._counts, now)
        left = [Left(*key, count.more, count.last) for key, count in over if count.more]
        told = [x for x in left if self._has_room(x.kind, x.more, x.last, now)]
        sums = _take_over(self._sums, now)
        return told + [Left(ALL, kind, count.more, count.last) for kind, count in sums if count.more]

    @property
    def next_end(self) -> float | None:
        """When the next minute is over; None: nothing is counted."""
        left_out = (count for count in self._sums.values() if count.more)
        return min((count.ends_at for count in (*self._counts.values(), *left_out)), default=None)

    def _has_room(self, kind: str, more: int, text: str, now: float) -> bool:
        """Whether there may be a line more of that kind; if not, it is left out, and what it tells is counted."""
        count = _current(self._sums, kind, now)
        if count.lines >= limits.LINES_ENGINE:
            count.leave_out(more, text)
            return False
        count.lines += 1
        return True


def _current(counts: dict[K, _Count], key: K, now: float) -> _Count:
    """Of this minute; one that has something to tell stays until it is told."""
    count = counts.get(key)
    if count is None or (count.ends_at <= now and not count.more):
        count = counts[key] = _Count(now + limits.LINES_S)
    return count


def _take_over(counts: dict[K, _Count], now: float) -> list[tuple[K, _Count]]:
    """Those whose minute is over, which leave."""
    over = [(key, count) for key, count in counts.items() if count.ends_at <= now]
    for key, _ in over:
        del counts[key]
    return over
