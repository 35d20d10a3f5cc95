"""Bytes that peers make us hold, counted by link and for all of them. Pure; for one thread."""

from __future__ import annotations


class Budget:
    """What the links may hold.

    Args:
        link_nbytes: One of them, at most.
        all_nbytes: All together.

    Attributes:
        taken: What all hold.
    """

    def __init__(self, link_nbytes: int, all_nbytes: int) -> None:
        self._link_nbytes = link_nbytes
        self._all_nbytes = all_nbytes
        self._held: dict[bytes, int] = {}
        self.taken = 0

    def take(self, link: bytes, nbytes: int) -> bool:
        """Whether there is room for so much more; then it is taken. ``link``: its token."""
        held = self._held.get(link, 0) + nbytes
        if held > self._link_nbytes or self.taken + nbytes > self._all_nbytes:
            return False
        self._held[link] = held
        self.taken += nbytes
        return True

    def give(self, link: bytes, nbytes: int) -> None:
        """So much is held no more."""
        held = self._held.get(link)
        if held is not None:
            self._held[link] = held - nbytes
            self.taken -= nbytes

    def forget(self, link: bytes) -> None:
        """The link is gone."""
        self.taken -= self._held.pop(link, 0)
