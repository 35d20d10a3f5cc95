"""A number of things for the links of all peers, of which nobody has the last ones. Pure; guarded by its owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Quota:
    """So many for all: an address may have as many as are free then, a link as many as its address may have more.

    So peers of one address, however many, leave half of them to others, and each link leaves half of that to those
    beside it.

    Args:
        most: How many there are.

    Attributes:
        taken: How many of them are in use.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: Counter[Hashable] = Counter()
        self._of: Counter[Hashable] = Counter()
        self.taken = 0

    def may_take(self, address: Hashable, link: Hashable) -> bool:
        """Whether a link of that address may take one now."""
        room = (self._most - self.taken - self._at[address] + 1) // 2  # until both are as many
        return self._of[link] < room

    def take(self, address: Hashable, link: Hashable) -> None:
        """It takes one."""
        self.taken += 1
        self._at[address] += 1
        self._of[link] += 1

    def give(self, address: Hashable, link: Hashable) -> None:
        """It needs one no more."""
        self.taken -= 1
        self._at[address] -= 1
        self._of[link] -= 1
        self._at, self._of = +self._at, +self._of  # without those that have none

    def held(self, address: Hashable, link: Hashable) -> tuple[int, int]:
        """How many the address has, and how many the link: who has fewest is next, who has most gives way."""
        return self._at[address], self._of[link]
