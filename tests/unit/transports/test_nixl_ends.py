"""Transport ``nixl`` with agents that are not NIXL's: how reads end, and peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import nixl_read
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_use import Use
from llm_datadist.transports.seam import FaultKind, Progress, RegistrationRefused, TransportUnavailable
from tests.support.fake_nixl import FakeAgent
from tests.support.nixl_rig import SIZE, Rig, kind_of, region
from tests.support.world import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_transfer_that_does_not_end_is_cut_after_the_linger_time(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    before = set(rig.world.living)
    rig.world.held.set()
    rig.here[:] = 0
    watch = Stopwatch()
    assert kind_of(rig.read(time_s=0.5)) is FaultKind.TIMEOUT
    assert watch.elapsed >= 0.55
    assert set(rig.world.living) < before, "destroyed, or it would write later"
    rig.world.held.clear()
    assert not rig.here.any()
    rig.check()


def test_a_transfer_that_ends_in_the_linger_time_keeps_its_agent(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    before = set(rig.world.living)
    read = rig.channel.read(rig.plan())

    def finish() -> None:
        rig.world.held.set()
        if read._fault is not None:
            rig.world.held.clear()

    rig.world.before_end = finish
    progress = read.wait(deadline=time.monotonic() + 0.02)
    assert kind_of(progress) is FaultKind.TIMEOUT
    assert progress.nbytes == SIZE
    assert set(rig.world.living) == before


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancel_and_close_end_a_stuck_read(rig: Rig, how: str) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.world.held.set()
    read = rig.channel.read(rig.plan())
    looked = threading.Event()
    rig.world.before_end = looked.set
    answers: list[Progress] = []
    thread = threading.Thread(target=lambda: answers.append(read.wait(deadline=time.monotonic() + 30)))
    thread.start()
    assert looked.wait(10)
    if how == "cancel":
        read.cancel("enough")
    else:
        rig.channel.close()
    thread.join(10)
    assert kind_of(answers[0]) is FaultKind.CANCELLED
    assert not rig.world.readers()
    rig.world.held.clear()
    assert not rig.here.any()


def test_what_another_read_has_cut_is_begun_again(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=2 * SIZE)
    rig.world.held.set()
    answers: list[Progress] = []
    patient = threading.Thread(target=lambda: answers.append(rig.read(SIZE)))
    patient.start()
    assert wait_until(lambda: any(agent._transfers for agent in rig.world.readers()), 10)
    first = rig.world.readers()
    hasty = rig.channel.read(rig.plan(to=2 * SIZE)).wait(deadline=time.monotonic() + 0.05)
    assert kind_of(hasty) is FaultKind.TIMEOUT
    assert wait_until(lambda: any(agent._transfers for agent in rig.world.readers()), 10)
    assert rig.world.readers() != first
    rig.world.held.clear()
    patient.join(10)
    assert answers == [Progress(SIZE)]
    assert np.array_equal(rig.here[:SIZE], rig.there[SIZE : 2 * SIZE])


def test_a_session_that_another_read_cuts_is_there_for_who_prepares_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is not destroyed before, and what has arrived is right."""
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    rig.tell(rig.source + SIZE, nbytes=SIZE)
    use = Use()
    during = use.during()
    during.acquire()
    session = rig.channel.current(use)
    assert session is not None

    def load(agent: FakeAgent, metadata: bytes) -> None:
        monkeypatch.undo()
        cutting.start()
        assert wait_until(lambda: session.doomed, 10)
        agent.load(metadata)

    def cut() -> None:
        session.doom()
        use.leave()
        during.release()

    cutting = threading.Thread(target=cut)
    monkeypatch.setattr(FakeAgent, "load", load)
    rig.check(SIZE)
    cutting.join(10)
    assert session._destroyed.is_open


def test_an_interrupted_wait_leaves_no_transfer(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.world.before_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.read()
    rig.world.before_end = None
    assert not rig.world.readers()
    rig.check()


def test_a_peer_that_is_gone_is_lost_every_time(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    rig.world.unreachable |= {rig.owner._serving.name}
    rig.here[:] = 0
    for _ in range(3):
        assert kind_of(rig.read()) is FaultKind.PEER_LOST
        assert (
            kind_of(rig.channel.read_word(rig.source, deadline=time.monotonic() + 9)) is FaultKind.PEER_LOST
        )
    assert not rig.here.any()
    rig.world.unreachable.clear()
    rig.check()


def test_a_peer_that_has_started_again_is_another(rig: Rig) -> None:
    """Same memory, same address: nothing of the former life reaches it."""
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    old = rig.channel
    rig.owner.close()
    rig.owner = NixlTransport(lambda n: b"\xee" * n, agents=rig.world.agents)
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    assert kind_of(rig.read()) is FaultKind.PEER_LOST
    old.admit(token)
    assert kind_of(rig.read()) is FaultKind.PEER_LOST
    rig.channel = rig.open()
    rig.channel.admit(token)
    rig.check()


def test_g11_what_an_agent_takes_to_be_made_is_not_the_peers_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is busy it takes seconds. An opening has its time all the same, and ends when that is over."""
    jumped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jumped[0], sleep=time.sleep)
    monkeypatch.setattr(nixl_read, "time", clock)
    plain = rig.world.agents

    def agents(name: str, serving: bool, within_host: bool) -> FakeAgent:
        jumped[0] += 3600
        return plain(name, serving, within_host)

    monkeypatch.setattr(rig.reader, "_agents", agents)
    rig.open().close()
    rig.world.held.set()
    rig.world.before_end = lambda: jumped.append(jumped.pop() + 3600)
    with pytest.raises(TransportUnavailable, match="the time ran out"):
        rig.open()
    rig.world.before_end = None


def test_closed_is_closed(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.channel.close()
    rig.channel.close()
    assert kind_of(rig.read()) is FaultKind.CANCELLED
    rig.reader.close()
    rig.reader.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        rig.open()
    with pytest.raises(RegistrationRefused, match="closed"):
        rig.reader.register(region(rig.destination, nbytes=SIZE))


@pytest.mark.parametrize(("time_s", "at_most_s"), [(0.2, 0.3), (0.0, 0.1), (-1.0, 0.1)])
def test_t2_a_short_read_lingers_for_a_tenth_of_its_time(time_s: float, at_most_s: float) -> None:
    rig = Rig(linger_s=5)
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    rig.world.held.set()
    watch = Stopwatch()
    assert kind_of(rig.read(time_s=time_s)) is FaultKind.TIMEOUT
    assert watch.within(at_most_s)
    rig.close()
