"""The control thread's time by address: however many links an address has, they have the time of one.

Strategy: in one round of the loop the connections of an address have ``TURN_S``, then those of others are looked
for; who came too late waits, in order, for a later round. What an address spends by using up turns counts against a
share, as for a link, while peers at other addresses ask for something: what nobody else wants is not divided.
Invariants: with one address, or where no other asks, each link has what its own share allows, as if there were no
addresses; a connection that does not use up its turns rests for no debt of its address, it only waits in order.
Threads: control thread, but for ``Pace.spend``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from llm_datadist._core import limits
from llm_datadist._core.share import Share
from llm_datadist._link.loop import ControlLoop, TimerHandle

GoOn: TypeAlias = Callable[[], None]


class _Host:
    """The connections of one address.

    Attributes:
        share: What all of them may spend in turns that were used up: each such turn, and each round of them all.
        members: How many they are.
        is_leaving: There are none any more, but what they have spent is remembered.
    """

    __slots__ = (
        "_hosts", "_is_serving", "_quiet", "_round", "_spent_s", "_timer", "_uncharged_s", "_waiting", "_wakes_at",
        "is_leaving", "members", "share",
    )  # fmt: skip

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.share, self._quiet = _share(), _share()
        self.members = 0
        self.is_leaving = False
        # First those that use up no turns of their own; what the others have spent keeps only the others waiting.
        self._waiting: tuple[deque[GoOn], deque[GoOn]] = deque(), deque()
        self._is_serving = False
        self._timer: TimerHandle | None = None  # goes on with those that wait
        self._wakes_at = math.inf
        self._round = -math.inf
        self._spent_s = self._uncharged_s = 0.0  # in that round

    def admits(self, go_on: GoOn, *, floods: bool) -> bool:
        """Whether there is time for a turn in this round; if not, ``go_on`` is called in a later one."""
        before = self._waiting if floods else self._waiting[:1]
        if self._has_time() and (self._is_serving or not any(before)):
            return True
        self._waiting[floods].append(go_on)
        if not self._is_serving:
            self._wake()
        return False

    def took(self, seconds: float, *, used_up: bool) -> None:
        """So long was a turn of one of them."""
        self._has_time()
        self._spent_s += seconds
        if used_up:
            self._hosts.charge(self.share, self, seconds)
        else:
            self._uncharged_s += seconds

    def rest_s(self, now: float) -> float:
        """How long one that uses up its turns rests for what all of them have spent."""
        return self._rest_s(self.share, now)

    def _rest_s(self, share: Share, now: float) -> float:
        return share.rest_s(now) if self._hosts.is_wanted(self, now) else 0.0

    def _has_time(self) -> bool:
        if self._round != self._hosts.loop.polled_at:
            self._round = self._hosts.loop.polled_at
            self._spent_s = self._uncharged_s = 0.0
        return self._spent_s < limits.TURN_S

    def _wake(self) -> None:
        """Goes on in a later round, with those that wait: all of them together have used up this one, which counts."""
        for share in (self.share, self._quiet):
            self._hosts.charge(share, self, self._uncharged_s)
        self._uncharged_s = 0.0
        now = time.monotonic()
        rests = zip(self._waiting, (self._quiet, self.share), strict=True)
        at = now + min(self._rest_s(share, now) for waiting, share in rests if waiting)
        if at < self._wakes_at:
            if self._timer is not None:
                self._timer.cancel()
            self._wakes_at = at
            self._timer = self._hosts.loop.call_at(at, self._go_on)

    def _go_on(self) -> None:
        self._timer, self._wakes_at, self._is_serving = None, math.inf, True
        try:
            for waiting, share in zip(self._waiting, (self._quiet, self.share), strict=True):
                while waiting and self._has_time() and self._rest_s(share, time.monotonic()) <= 0:
                    waiting.popleft()()
        finally:
            self._is_serving = False
            if any(self._waiting):
                self._wake()


def _share() -> Share:
    return Share(limits.ADDRESS_BURST_S, limits.SHARE, time.monotonic())


class Hosts:
    """All addresses of which there are connections.

    Args:
        loop: Whose time it is.
    """

    def __init__(self, loop: ControlLoop) -> None:
        self.loop = loop
        self._hosts: dict[str, _Host] = {}
        # Who asked last and when, and when one of another address did: whether the time is wanted by others.
        self._last: _Host | None = None
        self._last_at = self._others_at = -math.inf

    @property
    def several(self) -> bool:
        """Whether there is more than one address."""
        return len(self._hosts) > 1

    def join(self, end: bytes) -> Pace:
        """For a connection; ``end``: its peer's (``proofs.end_of``)."""
        address = end.rpartition(b" ")[0].decode()
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = _Host(self)
        host.members += 1
        return Pace(self, host, address)

    def leave(self, host: _Host, address: str) -> None:
        """One of its connections has gone. What it has spent is remembered until it has come back."""
        host.members -= 1
        if not host.members and not host.is_leaving:
            host.is_leaving = True
            self._forget(host, address)

    def _forget(self, host: _Host, address: str) -> None:
        now = time.monotonic()
        host.share.rest_s(now)  # it comes back
        if host.members:
            host.is_leaving = False
        elif host.share.used_s > 0:
            self.loop.call_at(now + host.share.used_s / limits.SHARE, lambda: self._forget(host, address))
        else:
            del self._hosts[address]

    def note_asked(self, host: _Host, now: float) -> None:
        """A peer there has asked for something."""
        if host is not self._last:
            self._others_at = self._last_at
            self._last = host
        self._last_at = now

    def is_wanted(self, host: _Host, now: float) -> bool:
        """Whether peers of other addresses have asked for something of late. From any thread."""
        return now - (self._others_at if host is self._last else self._last_at) < limits.WANTED_S

    def charge(self, share: Share, host: _Host, seconds: float) -> None:
        """An address has used up a turn, which counts if others want the time. From any thread."""
        if self.is_wanted(host, time.monotonic()):
            share.spend(seconds)


class Pace:
    """When one connection has its turns."""

    __slots__ = ("_address", "_floods", "_host", "_hosts", "_share")

    def __init__(self, hosts: Hosts, host: _Host, address: str) -> None:
        self._hosts = hosts
        self._host = host
        self._address = address
        self._floods = False  # its last turn was used up
        self._share = Share(limits.BURST_S, limits.SHARE, time.monotonic())

    def admits(self, go_on: GoOn) -> bool:
        """Whether it may have a turn now; if not, ``go_on`` is called when it may."""
        return not self._hosts.several or self._host.admits(go_on, floods=self._floods)

    def took(self, seconds: float, *, asked: bool, used_up: bool) -> float:
        """A turn is over: how long to rest before the next; 0.0: not at all.

        Args:
            seconds: How long it was.
            asked: Something was asked for; a sign of life is no such thing.
            used_up: There was more than a turn takes.
        """
        now = time.monotonic()
        if asked:
            self._hosts.note_asked(self._host, now)
        if self._hosts.several:
            self._host.took(seconds, used_up=used_up)
        self._floods = used_up
        if not used_up:
            return 0.0
        self._share.spend(seconds)
        rest_s = self._share.rest_s(now)
        if self._share.used_s > limits.FREE_S:
            rest_s = max(rest_s, seconds)
        return max(rest_s, self._host.rest_s(now))

    def spend(self, seconds: float) -> None:
        """The peer has cost another thread so much, for nothing. From any thread."""
        self._share.spend(seconds)
        self._hosts.charge(self._host.share, self._host, seconds)

    def leave(self) -> None:
        """Its connection has gone; once."""
        self._hosts.leave(self._host, self._address)
