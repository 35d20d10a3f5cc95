"""SIGINT again and again, in a process that makes all calls: KeyboardInterrupt and nothing else comes of it."""

from __future__ import annotations

import pytest

from tests.support import actors, allocated
from tests.support import signal_actors as signals
from tests.support.pair import COMBOS, Combo
from tests.support.pool import Spawner

ENDS_S = 5.0


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("combo", [c for c in COMBOS if c.backend != "shm"], ids=str)
@pytest.mark.timeout(150)
def test_g13_signals_all_the_time_leave_everything_working(
    spawn: Spawner, combo: Combo, seconds: float
) -> None:
    owner, caller = spawn(), spawn()
    address = owner.call(actors.up, 1, actors.options(combo.mode, combo.backend, "127.0.0.1:0"))
    more = {"MemPoolConfig": allocated.pool(1 << 20)}
    caller.call(actors.up, 2, actors.options(combo.mode, combo.backend, **more))
    for peer in (owner, caller):
        peer.call(signals.prepare)
    taking = owner.start(signals.take_notifies, seconds)  # or the queue is full in the end
    seen = caller.start(signals.interrupted_for, combo.mode, address, seconds, on_main=True).result(
        seconds + 60
    )
    taking.result(60)
    assert seen["interrupts"] > 5 * seconds, seen
    assert caller.attempt(actors.finalize).took.within(ENDS_S)
    assert owner.attempt(actors.finalize).took.within(ENDS_S)
