"""How many lines of the log there may be about the peers of one address. Pure; guarded by its owner."""

from __future__ import annotations

from dataclasses import dataclass

from llm_datadist._core import limits

OTHERS = "other addresses"


@dataclass(slots=True)
class _Count:
    ends_at: float
    lines: int = 0
    more: int = 0
    last: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """What was counted and not said, of one address and kind; ``last``: the last of it."""

    address: str
    kind: str
    more: int
    last: str


class LineCounts:
    """The first lines of each minute are said, the others counted.

    Args:
        addresses: For so many they are counted one by one; the rest shares one count.
    """

    def __init__(self, addresses: int = limits.ADDRESSES) -> None:
        self._addresses = addresses
        self._counts: dict[tuple[str, str], _Count] = {}

    def admit(self, address: str, kind: str, most: int, text: str, now: float) -> bool:
        """Whether this line may be said; ``most``: how many of the kind in a minute. Call ``ended`` first."""
        if (address, kind) not in self._counts and len(self._counts) >= self._addresses:
            address = OTHERS
        count = self._counts.get((address, kind))
        if count is None:
            count = self._counts[address, kind] = _Count(now + limits.LINES_S)
        if count.lines < most:
            count.lines += 1
            return True
        count.more += 1
        count.last = text
        return False

    def ended(self, now: float) -> list[Left]:
        """Forgets the counts whose minute is over; those with something left."""
        over = {key: count for key, count in self._counts.items() if count.ends_at <= now}
        for key in over:
            del self._counts[key]
        return [Left(*key, count.more, count.last) for key, count in over.items() if count.more]

    @property
    def next_end(self) -> float | None:
        """When the next minute is over; None: nothing is counted."""
        return min((count.ends_at for count in self._counts.values()), default=None)
