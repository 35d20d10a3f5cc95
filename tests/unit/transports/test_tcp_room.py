"""Row G17: long selectors wait for room among those of their link, and of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist.transports import tcp_room
from llm_datadist.transports.tcp_room import Room

MIB = 1 << 20


class Connection:
    """As a Room sees one."""

    def __init__(self, claimed: int, token: bytes = b"a") -> None:
        self.claimed, self.token, self.busy = claimed, token, False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(tcp_room, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_g17_a_short_selector_needs_no_room(clock: Any) -> None:
    room = Room()
    for _ in range(1000):
        assert room.admits(Connection(limits.LONG_SELECTOR_NBYTES))


def test_g17_the_next_long_one_waits_until_one_is_answered(clock: Any) -> None:
    room = Room()
    first, second, third = (Connection(16 * MIB) for _ in range(3))
    assert room.admits(first) and room.admits(second) and room.admits(second)
    assert not room.admits(third) and room.admitted() == []
    assert room.admits(Connection(16 * MIB, b"b")), "another link has room of its own"
    room.give_back(first)
    room.give_back(first)
    assert room.admitted() == [third] and not room.waiting
    room.give_back(third)
    room.forget(b"a")
    room.give_back(second)
    assert room.admits(Connection(16 * MIB)) and room.admits(Connection(16 * MIB))


def test_g17_who_has_cost_much_rests(clock: Any) -> None:
    room = Room()
    slow = Connection(MIB)
    assert room.admits(slow)
    room.spend(slow, limits.SELECTORS_BURST_S + 1.0)
    room.give_back(slow)
    assert not room.admits(slow)
    rest = room.look_again_s()
    assert rest == pytest.approx(1.0 / limits.SHARE)
    clock.now += rest + 0.001
    assert room.admitted() == [slow] and room.look_again_s() is None


def test_g17_one_that_does_not_come_to_its_end_loses_its_room_to_those_that_wait(clock: Any) -> None:
    room = Room()
    stuck, served = Connection(16 * MIB), Connection(16 * MIB)
    assert room.admits(stuck) and room.admits(served)
    served.busy = True
    clock.now += limits.HANDSHAKE_S + 1
    assert room.stalled() == [], "nobody waits"
    assert not room.admits(Connection(16 * MIB))
    assert room.stalled() == [stuck] and room.look_again_s() is not None
