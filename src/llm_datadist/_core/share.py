"""A link's share of the time of a thread that serves all. Pure; for that thread, but for ``spend``."""

from __future__ import annotations


class Share:
    """``burst_s`` at once, and ``share`` of the time in the long run.

    Args:
        burst_s: What may be spent before there is a rest.
        share: What comes back in each second.
        now: The time now.
    """

    __slots__ = ("_at", "_burst_s", "_left_s", "_share")

    def __init__(self, burst_s: float, share: float, now: float) -> None:
        self._burst_s = self._left_s = burst_s
        self._share = share
        self._at = now

    @property
    def used_s(self) -> float:
        """What was spent and has not come back yet."""
        return self._burst_s - self._left_s

    def spend(self, seconds: float) -> None:
        """So much was spent."""
        self._left_s -= seconds

    def rest_s(self, now: float) -> float:
        """How long it must rest before more may be spent; 0.0: it need not."""
        self._left_s = min(self._burst_s, self._left_s + (now - self._at) * self._share)
        self._at = now
        return max(0.0, -self._left_s / self._share)
