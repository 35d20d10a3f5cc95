"""An interrupt at any step of a read over TCP leaves its connection closed, or idle: never nobody's."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Segments
from llm_datadist.transports import tcp_pool
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_pool import Taker
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support.steps import Steps
from tests.support.tcp_rig import CALL_S, MakeRig, Rig, extents_of, memory_of
from tests.support.world import wait_until

SIZE = 300
FILES = ("tcp_units.py", "tcp_pool.py", "tcp_channel.py", "tcp_reading.py", "_sockets.py")
HEAD = b"a selector of blocks"


def plain(rig: Rig) -> Callable[[], object]:
    source, destination = memory_of(2, SIZE, 1), memory_of(2, SIZE, None)
    return lambda: rig.read(extents_of(source), extents_of(destination))


def unit(rig: Rig) -> Callable[[], object]:
    """The owner of this rig refuses it, which is an answer as well."""
    units = rig.channel.units(HEAD, np.full(2, memory_of(1, SIZE, None).ctypes.data, np.uint64), SIZE // 2)
    assert units is not None
    return lambda: units.read(0, 0, deadline=time.monotonic() + CALL_S, on_cut=lambda _: None)


# A socket that has only just been made goes with the last reference to it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "kept"), [(plain, True), (plain, False), (unit, True)], ids=["kept", "dialled", "unit"]
)
def test_an_interrupt_at_any_step_leaves_no_connection_behind(
    make_rig: MakeRig, kind: Callable[[Rig], Callable[[], object]], kept: bool
) -> None:
    rig = make_rig(connections=2)
    pool, refill, call = rig.channel.pool, plain(rig), kind(rig)
    number = 0
    while True:
        number += 1
        if kept:
            refill()
            assert pool.sockets(), "none is to be had any more"
        steps = Steps(number, files=FILES)
        if not steps.run(call):
            break
        assert {id(sock) for sock in pool.sockets()} == {id(c.sock) for c in pool._idle}, steps.where
        assert not pool._busy and not pool._dialling, steps.where
        assert all(sock.fileno() >= 0 for sock in pool.sockets()), steps.where
        if not kept:
            for connection in pool._idle:
                pool._drop(connection.sock)
            pool._idle.clear()
    assert number > 20
    plan = Segments(b"", extents_of(memory_of(1, 8, None)))
    assert rig.channel.read(plan).wait(deadline=time.monotonic() + CALL_S).fault is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [plain, unit])
def test_g12_a_second_interrupt_before_the_reclaiming_costs_no_connection(
    make_rig: MakeRig, kind: Callable[[Rig], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who needs a connection then finds what such reads have left; so does who closes them all."""
    rig = make_rig(connections=1)
    pool, refill, call = rig.channel.pool, plain(rig), kind(rig)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    for number in itertools.count(1):
        refill()
        with monkeypatch.context() as patch:
            patch.setattr(pool, "reclaim", interrupted)
            steps = Steps(number, files=FILES)
            if not steps.run(call):
                break
        refill()
        assert [c.sock for c in pool._idle] == pool.sockets() and not pool._busy, steps.where
    assert number > 20
    monkeypatch.setattr(pool, "reclaim", interrupted)
    for number in range(1, 20):
        Steps(number, files=FILES).run(call)
    pool.close()
    assert not pool.sockets()


def test_only_what_is_nobodys_is_reclaimed(make_rig: MakeRig) -> None:
    pool = make_rig(connections=3).channel.pool
    busy, idle, waiting = Taker(), Taker(), Taker()
    held, kept = (pool.take(taker, time.monotonic() + CALL_S) for taker in (busy, idle))
    assert isinstance(held, ReadingConnection) and isinstance(kept, ReadingConnection)
    pool.give_back(idle, kept)
    pool.reclaim(Taker())
    assert {id(s) for s in pool.sockets()} == {id(held.sock), id(kept.sock)}
    assert held.sock.fileno() >= 0 <= kept.sock.fileno()
    dialled = socket.socket()
    idle.sock = dialled  # and not connected yet
    pool.reclaim(idle)
    assert dialled.fileno() < 0 <= held.sock.fileno()
    pool.reclaim(busy)
    pool.cancel(busy, Fault(FaultKind.CANCELLED, "late"))
    assert pool.sockets() == [kept.sock] and held.sock.fileno() < 0 <= kept.sock.fileno()
    assert pool.take_idle(waiting) is kept
    pool.give_back(waiting, kept)


def test_a_reclaimed_connection_makes_room_for_those_that_wait(make_rig: MakeRig) -> None:
    pool = make_rig(connections=1).channel.pool
    first, second, found = Taker(), Taker(), list[Any]()
    assert isinstance(pool.take(first, time.monotonic() + CALL_S), ReadingConnection)
    waits = threading.Thread(target=lambda: found.append(pool.take(second, time.monotonic() + CALL_S)))
    waits.start()
    assert wait_until(lambda: len(pool._waiting) == 1, CALL_S)
    pool.reclaim(first)
    waits.join(CALL_S / 2)
    assert found and isinstance(found[0], ReadingConnection)
    pool.give_back(second, found[0])


def test_what_may_not_have_been_asked_for_is_asked_for_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when a second has gone by."""
    monkeypatch.setattr(tcp_pool, "_ASK_AGAIN_S", 2 * CALL_S)
    rig = make_rig(reader_dials=False)
    read, dial_for_peer = plain(rig), rig.owner_channel.dial_for_peer

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.owner_channel, "dial_for_peer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read()
    monkeypatch.setattr(rig.owner_channel, "dial_for_peer", dial_for_peer)
    source, destination = memory_of(1, SIZE, 2), memory_of(1, SIZE, None)
    assert rig.read(extents_of(source), extents_of(destination), timeout_s=CALL_S / 2).fault is None
    assert rig.asked == [1, 1]
