"""Row G17 on control connections: what is owed to a peer, what waits for it, and what it may say."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist._link.connection import Connection
from llm_datadist._link.hosts import Pace
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._wire.framing import Frame
from llm_datadist._wire.messages import Done, Finish, Ping, Pong, Unlink
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.attacks import frame
from tests.support.links import Engine, Notes
from tests.support.raw_links import RawPeer
from tests.support.world import wait_until

OK = LLMStatusCode.LLM_SUCCESS
MIB = 1 << 20
HOSTILE = "127.0.0.2"


def connection(engine: Engine) -> Connection:
    (conn,) = engine.service._driver._conns.values()
    return conn


class Generous(Notes):
    """Gives a short question a long answer."""

    def on_message(self, link: Link, frame: Frame) -> None:
        super().on_message(link, Frame(frame.message, (bytes(256 << 10),)))


def test_g17_two_that_owe_each_other_much_both_have_their_answers() -> None:
    """Each has more to say than the sockets take, before either has read any of it."""
    with Engine(1, notes=Generous()) as a, Engine(2, notes=Generous()) as b:
        assert a.service.dial([b.target], 5) == [OK]
        assert b.notes.wait_for(lambda: bool(b.notes.ups))
        links = [a.notes.ups[0], b.notes.ups[0]]
        asked = [link.call(Unlink(id=link.next_id(), time_left_ms=1)) for _ in range(100) for link in links]
        assert wait_until(lambda: all(one.answered for one in asked), 20)


@pytest.mark.rule("S.24")
def test_g17_a_link_whose_answers_are_not_read_is_not_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever: its questions wait, and when so many do, it does."""
    monkeypatch.setattr(limits, "HELD_NBYTES", 4 * MIB)
    question = frame(Unlink(id=7, time_left_ms=1), bytes(16 << 10))  # and as long an answer
    with Engine(1, heartbeat_ms=60_000) as engine, RawPeer(engine.address) as peer:
        peer.link(1)
        conn = connection(engine)
        asking = threading.Thread(target=lambda: peer.sock.sendall(question * 4096), daemon=True)
        peer.sock.settimeout(30)
        asking.start()
        assert wait_until(lambda: conn.inbox.is_full and conn._interest == selectors.EVENT_WRITE, 20)
        assert conn.outbox.nbytes < limits.OWED_NBYTES + limits.TURN_NBYTES
        assert conn.inbox.waiting_nbytes < limits.HELD_NBYTES + limits.TURN_NBYTES
        taken = conn.session.frames_in
        assert taken < 4096, "the rest waits in its socket"
        for _ in range(4096):  # it reads at last: each question is answered
            assert isinstance(peer.hear(), Done)
        asking.join(5)


def test_g17_what_we_say_of_ourselves_stops_no_reading() -> None:
    """A large table waits for a peer that is slow; its questions are heard meanwhile."""
    with Engine(1) as engine, RawPeer(engine.address) as peer:
        peer.link(1)
        assert engine.notes.wait_for(lambda: bool(engine.notes.ups))
        link = engine.notes.ups[0]
        for _ in range(20):
            link.post(Finish(id=1), [bytes(MIB)])
        link.flush()
        assert connection(engine).outbox.nbytes > 8 * MIB
        peer.say(Unlink(id=3, time_left_ms=1))
        assert engine.notes.wait_for(lambda: bool(engine.notes.frames))


def test_g17_two_that_tell_each_other_large_tables_both_arrive() -> None:
    with Engine(1) as a, Engine(2) as b:
        for engine in (a, b):
            engine.notes.first_words = lambda link: [link.post(Finish(id=n), [bytes(MIB)]) for n in range(24)]
        assert a.service.dial([b.target], 5) == [OK]
        for engine in (a, b):
            assert engine.notes.wait_for(lambda engine=engine: len(engine.notes.frames) == 24, 10)


def test_g17_all_links_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OUTBOXES_NBYTES", 24 * MIB)
    with Engine(1) as engine, RawPeer(engine.address) as first, RawPeer(engine.address) as second:
        first.link(1, 8)
        second.link(1, 9)
        assert engine.notes.wait_for(lambda: len(engine.notes.ups) == 2)
        one, other = engine.notes.ups
        for _ in range(16):
            one.send(Finish(id=1), [bytes(MIB)])
        with contextlib.suppress(LinkLost):
            for _ in range(48):  # the system takes some of it, how much differs
                other.send(Finish(id=1), [bytes(MIB)])
        assert engine.notes.wait_for(lambda: bool(engine.notes.downs))
        ((link, reason),) = engine.notes.downs
        assert link is other and "does not read" in reason


def flooded(conns: dict[Any, Connection]) -> int:
    """On how many so much was heard; the control thread may change them meanwhile."""
    return sum(conn.session.frames_in > 5000 for conn in list(conns.values()))


def test_g18_a_flood_has_its_share_and_others_their_turns() -> None:
    """Between two messages of one that floods, another peer's question is answered."""
    with (
        Engine(1, heartbeat_ms=60_000) as engine,
        RawPeer(engine.address) as flood,
        RawPeer(engine.address) as peer,
    ):
        flood.link(1, 8)
        peer.link(1, 9)
        pings = frame(Ping(id=7)) * 20_000
        flood.sock.setblocking(False)
        watch, answered = Stopwatch(), []
        conns = engine.service._driver._conns
        while watch.elapsed < 0.5 or (watch.within(20) and not flooded(conns)):
            for attempt in (lambda: flood.sock.send(pings), lambda: flood.sock.recv(MIB)):
                try:
                    attempt()
                except BlockingIOError:
                    continue
            asked = Stopwatch()
            peer.say(Ping(id=1))
            assert isinstance(peer.hear(), Pong)
            answered.append(asked.within(0.01))
        assert sum(answered) > len(answered) // 2
        assert flooded(conns) == 1, "and the flood was served all the while"


@pytest.mark.rule("S.25", "S.28")
def test_g18_many_links_of_one_address_leave_another_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty that flood have, together, a turn in each round of the loop, and the share of one link."""
    monkeypatch.setattr(limits, "ADDRESS_BURST_S", 0.05)
    monkeypatch.setattr(
        limits, "WANTED_S", 60.0
    )  # whatever the machine does between two questions of the other
    rounds: dict[float, list[float]] = {}
    took = Pace.took

    def note(pace: Pace, seconds: float, **how: bool) -> float:
        if pace._address.startswith(HOSTILE):
            rounds.setdefault(pace._hosts.loop.polled_at, []).append(seconds)
        return took(pace, seconds, **how)

    with Engine(1, heartbeat_ms=60_000) as engine, contextlib.ExitStack() as stack:
        flood = [stack.enter_context(RawPeer(engine.address, at=HOSTILE)) for _ in range(20)]
        peer = stack.enter_context(RawPeer(engine.address))
        for number, one in enumerate((*flood, peer)):
            one.link(1, 100 + number)
        for one in flood:
            one.sock.setblocking(False)
        ask(peer)
        monkeypatch.setattr(Pace, "took", note)
        watch, pings = Stopwatch(), frame(Ping(id=7)) * 4000
        while watch.elapsed < 1.0 or (watch.within(20) and len(rounds) < 50):
            for one in flood:
                with contextlib.suppress(BlockingIOError):
                    one.sock.send(pings)
                with contextlib.suppress(BlockingIOError):
                    one.sock.recv(MIB)
            ask(peer)
        began, *_, ended = sorted(rounds)
        monkeypatch.undo()
    for turns in rounds.values():
        assert sum(turns[:-1]) < limits.TURN_S, "others were looked for in between"
    every = sorted(seconds for turns in rounds.values() for seconds in turns)
    assert sum(every) <= 0.05 + limits.SHARE * (ended - began) + sum(every[-2 * len(flood) :])


def ask(peer: RawPeer) -> None:
    peer.say(Ping(id=1))
    assert isinstance(peer.hear(), Pong)


@pytest.mark.rule("S.28")
def test_g18_newcomers_of_other_parts_have_their_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dials, at whatever socket: it rests when the share is used up, and what is no newcomer goes on."""
    monkeypatch.setattr(limits, "NEWCOMERS_BURST_S", 0.0)
    monkeypatch.setattr(limits, "NEWCOMERS_SHARE", 1e-9)
    calls = {"newcomers": 0, "others": 0}
    enough = threading.Event()

    def look() -> float:  # what has come is never taken, so it is called again and again
        calls["newcomers"] += 1
        return 0.0

    def hear() -> None:
        calls["others"] += 1
        if calls["others"] == 100:
            enough.set()

    left, right = socket.socketpair()
    other_left, other_right = socket.socketpair()
    with Engine(1) as engine, left, right, other_left, other_right:
        for sock in (right, other_right):
            sock.send(b"x")
        engine.service.add_reader(left, look)
        engine.service.add_reader(other_left, hear)
        assert enough.wait(20)
        assert calls["newcomers"] == 1
        for sock in (left, other_left):
            engine.service.remove_reader(sock)


def test_g17_a_long_text_is_cut_by_its_sender() -> None:
    with Engine(1) as a, Engine(2) as b:
        assert a.service.dial([b.target], 5) == [OK]
        link = a.service.get(2)
        assert link is not None
        link.send(Done(id=99, code=0, text="é" * 20_000))
        assert b.notes.wait_for(lambda: bool(b.notes.frames))
        answer: Any = b.notes.frames[0][1].message
        assert answer.text == "é" * limits.TEXT_CHARS


@pytest.mark.rule("S.5", "S.28")
def test_g17_of_too_many_handshakes_the_oldest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HANDSHAKES", 3)
    with Engine(1) as engine:
        linked = RawPeer(engine.address)
        linked.link(1)
        idle = [RawPeer(engine.address) for _ in range(4)]
        assert idle[0].hear() is None, "the oldest"
        idle[1].link(1, 8)
        assert len(engine.service.links()) == 2
        for peer in (linked, *idle):
            peer.sock.close()
