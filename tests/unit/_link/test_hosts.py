"""Row G18: an address has the time of one link of the control thread, however many links it has."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist._link.hosts import Hosts, Pace
from llm_datadist._link.loop import TimerHandle

TURN_S = 0.0005  # of 16 pings
MANY = 20


class Loop:
    """A control loop on a clock of its own: what is ready has its turn, then timers."""

    def __init__(self) -> None:
        self.now = self.polled_at = 100.0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._order = itertools.count()

    def call_at(self, when: float, fn: Callable[[], None]) -> TimerHandle:
        timer = TimerHandle(self, fn)  # type: ignore[arg-type]
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def forget_cancelled(self) -> None:
        pass

    def round(self, ready: list[Conn]) -> None:
        before = self.polled_at = self.now
        for conn in ready:
            conn.read()
        while self._timers and self._timers[0][0] <= before:
            fn = heapq.heappop(self._timers)[2].take()
            if fn is not None:
                fn()
        if self.now == before:
            self.now += 0.00001  # nobody wanted anything


class Conn:
    """A connection that always has something to read."""

    def __init__(self, loop: Loop, pace: Pace, *, used_up: bool, turn_s: float = TURN_S) -> None:
        self._loop, self._pace, self._used_up, self._turn_s = loop, pace, used_up, turn_s
        self.rests = False
        self.turns: list[float] = []

    def read(self) -> None:
        if self.rests:
            return
        self.rests = not self._pace.admits(self.go_on)
        if self.rests:
            return
        self.turns.append(self._loop.now)
        self._loop.now += self._turn_s
        rest_s = self._pace.took(self._turn_s, asked=True, used_up=self._used_up)
        if rest_s > 0:
            self.rests = True
            self._loop.call_at(self._loop.now + rest_s, self.go_on)

    def go_on(self) -> None:
        self.rests = False
        self.read()

    @property
    def spent_s(self) -> float:
        return len(self.turns) * self._turn_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(time, "monotonic", lambda: loop.now)
    return loop


@pytest.fixture
def hosts(loop: Loop) -> Hosts:
    return Hosts(loop)  # type: ignore[arg-type]


def end(address: str, port: int = 1) -> bytes:
    return f"{address}%0 {port}".encode()


def conns(loop: Loop, hosts: Hosts, address: str, count: int, **more: Any) -> list[Conn]:
    return [Conn(loop, hosts.join(end(address, n)), **more) for n in range(count)]


def run(loop: Loop, seconds: float, *ready: list[Conn]) -> None:
    until = loop.now + seconds
    while loop.now < until:
        loop.round([conn for group in ready for conn in group])


@pytest.mark.parametrize("used_up", [True, False], ids=["floods", "many that use up no turn"])
def test_g18_many_links_of_one_address_have_the_share_of_one(loop: Loop, hosts: Hosts, used_up: bool) -> None:
    flood = conns(loop, hosts, "10.0.0.2", MANY, used_up=used_up)
    honest = conns(loop, hosts, "10.0.0.1", 1, used_up=False, turn_s=0.0001)
    seconds = 5.0
    run(loop, seconds, flood, honest)
    spent_s = sum(conn.spent_s for conn in flood)
    slack_s = limits.TURN_S * 4
    assert (
        0.9 * limits.SHARE * seconds <= spent_s <= limits.ADDRESS_BURST_S + limits.SHARE * seconds + slack_s
    )
    each = [len(conn.turns) for conn in flood]
    assert max(each) - min(each) <= 0.05 * max(each), "one as much as the other"
    waits = [b - a for a, b in zip(honest[0].turns, honest[0].turns[1:], strict=False)]
    assert max(waits) <= limits.TURN_S + TURN_S + 0.0002, "it waited for more than a turn"


def test_g18_from_the_first_moment_on_an_address_has_one_turn_before_the_next(
    loop: Loop, hosts: Hosts
) -> None:
    flood = conns(loop, hosts, "10.0.0.2", MANY, used_up=True)
    honest = conns(loop, hosts, "10.0.0.1", 1, used_up=False, turn_s=0.0001)
    loop.round([*flood, *honest])
    loop.round([*flood, *honest])
    assert sum(len(conn.turns) for conn in flood) <= 2 * limits.TURN_S / TURN_S
    assert len(honest[0].turns) == 2


@pytest.mark.parametrize("others", [0, 1], ids=["no other address", "another that asks for nothing"])
def test_g18_what_no_other_address_wants_is_not_divided(loop: Loop, hosts: Hosts, others: int) -> None:
    """The rule of links alone: so a peer is not worse off for what others at its address do."""
    conns(loop, hosts, "10.0.0.1", others, used_up=False)
    flood = conns(loop, hosts, "10.0.0.2", MANY, used_up=True)
    run(loop, 3.0, flood)
    assert sum(conn.spent_s for conn in flood) > 0.9 * 3.0


def test_g18_who_uses_up_no_turn_does_not_rest_for_its_neighbours(loop: Loop, hosts: Hosts) -> None:
    flood = conns(loop, hosts, "10.0.0.2", MANY, used_up=True)
    honest = conns(loop, hosts, "10.0.0.1", 1, used_up=False, turn_s=0.0001)
    run(loop, 2.0, flood, honest)
    (neighbour,) = conns(loop, hosts, "10.0.0.2", 1, used_up=False, turn_s=0.0001)
    run(loop, 1.0, flood, honest, [neighbour])
    waits = sorted(b - a for a, b in zip(neighbour.turns, neighbour.turns[1:], strict=False))
    assert waits[len(waits) // 2] < 2 * TURN_S


def test_g18_what_an_address_has_spent_is_not_forgotten_with_its_links(loop: Loop, hosts: Hosts) -> None:
    honest = conns(loop, hosts, "10.0.0.1", 1, used_up=False, turn_s=0.0001)
    seconds, spent_s = 5.0, 0.0
    until = loop.now + seconds
    while loop.now < until:  # new links for old ones, ten times a second
        flood = [(pace, Conn(loop, pace, used_up=True)) for pace in (hosts.join(end("10.0.0.2")),)]
        run(loop, 0.1, [conn for _, conn in flood], honest)
        spent_s += sum(conn.spent_s for _, conn in flood)
        for pace, conn in flood:
            conn.rests = True
            pace.leave()
    assert spent_s <= limits.ADDRESS_BURST_S + limits.SHARE * seconds + 0.1


def test_g18_an_address_is_forgotten_when_it_has_paid(loop: Loop, hosts: Hosts) -> None:
    honest = conns(loop, hosts, "10.0.0.1", 1, used_up=False)
    pace = hosts.join(end("10.0.0.2"))
    run(loop, 1.0, [Conn(loop, pace, used_up=True)], honest)
    pace.leave()
    assert set(hosts._hosts) == {"10.0.0.1%0", "10.0.0.2%0"}
    honest[0].rests = True
    run(loop, limits.ADDRESS_BURST_S / limits.SHARE + 1.0)
    assert set(hosts._hosts) == {"10.0.0.1%0"}


def test_g18_what_a_peer_costs_other_threads_counts_for_its_address(loop: Loop, hosts: Hosts) -> None:
    (honest,) = conns(loop, hosts, "10.0.0.1", 1, used_up=False)
    first, second = hosts.join(end("10.0.0.2", 1)), hosts.join(end("10.0.0.2", 2))
    loop.round([honest])
    first.spend(limits.ADDRESS_BURST_S + 0.1)
    assert second.took(0.001, asked=True, used_up=True) > 0.1 / limits.SHARE
    assert second.took(0.001, asked=True, used_up=False) == 0.0
