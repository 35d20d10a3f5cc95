"""An interrupt at any step of a read with transport ``nixl`` leaves no user counted, and no agent nobody's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest

from llm_datadist.testing.board import extents, uncut
from llm_datadist.transports import _nixl
from llm_datadist.transports.nixl_session import Session
from llm_datadist.transports.nixl_use import Use
from llm_datadist.transports.seam import FaultKind
from tests.support.nixl_rig import SIZE, Rig, kind_of
from tests.support.steps import Steps

FILES = tuple(f"nixl{name}.py" for name in ("_use", "_session", "_channel", "_read", "_again", "_small"))
LOOKS = 3  # that a transfer is under way
Call = Callable[[], object]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.world.interrupted = True
    rig.tell(rig.source, nbytes=4 * SIZE)
    yield rig
    rig.close()


def plain(rig: Rig) -> Call:
    return lambda: rig.read()


def word(rig: Rig) -> Call:
    return lambda: rig.channel.read_word(rig.source, deadline=time.monotonic() + 10)


def rows(rig: Rig) -> Call:
    whole = [(0, 4 * SIZE)]
    made = rig.channel.rows(extents([rig.source], whole), extents([rig.destination], whole), SIZE)
    assert made is not None
    return lambda: made.read(0, 0, deadline=time.monotonic() + 10, on_cut=uncut)


def lost(rig: Rig) -> Call:
    """The peer is gone, and asked whether it lives."""

    def call() -> None:
        rig.world.unreachable |= {rig.owner._serving.name}
        try:
            assert kind_of(rig.read()) is FaultKind.PEER_LOST
        finally:
            rig.world.unreachable.clear()

    return call


def late(rig: Rig) -> Call:
    """A transfer that does not end in its time is cut."""

    def call() -> None:
        rig.world.held.set()
        try:
            rig.channel.read(rig.plan()).wait(deadline=time.monotonic() + 0.001)
        finally:
            rig.world.held.clear()

    return call


def _slowly(rig: Rig) -> None:
    """Each transfer is looked at some times before it ends."""
    looks = itertools.count(1)

    def look() -> None:
        if next(looks) % LOOKS:
            rig.world.held.set()
        else:
            rig.world.held.clear()

    rig.world.before_end = look


def _check(rig: Rig, where: object) -> None:
    sessions: list[Session] = rig.channel._sessions
    assert not any(session._users for session in sessions), where
    owned = {id(agent) for session in sessions for agent in session._made}
    assert {id(agent) for agent in rig.world.readers()} <= owned, where
    assert not any(agent._under_way for agent in rig.world.readers()), ("it goes on writing", where)


STRIDES = pytest.mark.parametrize(
    "stride", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
CALLS = pytest.mark.parametrize("kind", [plain, word, rows, lost, late])


@CALLS
@STRIDES
@pytest.mark.parametrize("fresh", [False, True], ids=["again", "first"])
def test_g12_an_interrupt_at_any_step_leaves_no_user(
    rig: Rig, kind: Callable[[Rig], Call], stride: int, fresh: bool
) -> None:
    """Nothing writes any more when it is raised, and the next read is right."""
    call = kind(rig)
    _slowly(rig)
    for number in itertools.count(1, stride):
        if fresh:
            with rig.channel._making:
                rig.channel._drop_made()
        else:
            rig.check()
        steps = Steps(number, files=FILES)
        if not steps.run(call):
            break
        _check(rig, steps.where)
        rig.check()
        assert len(rig.world.readers()) == 1, steps.where
    assert number > 30


@CALLS
@STRIDES
def test_g12_what_two_interrupts_leave_the_next_read_finds(
    rig: Rig, kind: Callable[[Rig], Call], stride: int
) -> None:
    call = kind(rig)
    _slowly(rig)
    for number in itertools.count(1, stride):
        steps = Steps(number, number + 1 + number % 13, files=FILES)
        if not steps.run(call):
            break
        rig.check()
        _check(rig, steps.where)
        assert len(rig.world.readers()) == 1, steps.where
    assert number > 30


def test_who_was_broken_off_before_it_could_leave_dooms_its_session(rig: Rig) -> None:
    """The next to look does it: a read, and the end of memory that was written."""
    for look in (rig.check, lambda: rig.reader.unregister(rig.own)):
        rig.check()
        session = rig.channel._session
        assert session is not None
        use = Use()
        with use.during():
            assert session.enter(use)
        look()
        assert session.is_destroyed
        assert all(agent not in rig.world.readers() for agent in session._made)


class _Bound:
    """What the bindings would make."""

    living: ClassVar[int] = 0

    def __init__(self, name: str, config: object) -> None:
        _Bound.living += 1
        self.released: list[int] = []

    def createBackend(self, name: str, options: object) -> None:  # noqa: N802 - NIXL's
        pass

    def releaseXferReq(self, transfer: int) -> None:  # noqa: N802
        self.released.append(transfer)

    def getNotifs(self, known: object, backends: object) -> None:  # noqa: N802
        pass

    def __del__(self) -> None:
        _Bound.living -= 1


def test_g12_an_agent_whose_making_or_end_is_interrupted_is_destroyed_once() -> None:
    bindings = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=_Bound, NIXL_THREAD_SYNC_RW=0)
    make = partial(_nixl._Agent, bindings)
    for number in itertools.count(1):
        made: list[_nixl._Agent] = []
        steps = Steps(number, files="_nixl.py")
        if not steps.run(lambda: made.extend(map(make, ("a",), (False,), (True,)))):  # noqa: B023
            made[0].close([])
            break
        assert not made and not _Bound.living, steps.where
    assert number > 5
    for number in itertools.count(1):
        agent, transfers = make("a", False, True), [1, 2, 3]
        released = agent._agent.released
        steps = Steps(number, files="_nixl.py")
        struck = steps.run(lambda: agent.close(transfers))  # noqa: B023
        agent.close(transfers)
        assert released == [1, 2, 3] and not transfers and not _Bound.living, steps.where
        if not struck:
            break
    assert number > 5
