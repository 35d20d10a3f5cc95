"""Asking peers to end what they read: who counts as done, and that all are asked at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._engine.settling import settle
from llm_datadist._link.link import LinkLost
from llm_datadist._wire.messages import Done, Settle
from llm_datadist.status import CacheNotExistError
from tests.support.engines import Engines
from tests.support.world import wait_until

SOON_S = 0.05


class Pending:
    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.closed = False

    def wait(self, deadline: float) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return type("Frame", (), {"message": self._answer})

    def close(self) -> None:
        self.closed = True


class Link:
    """Answers a question with what it was given; an exception in the call itself if ``gone``."""

    def __init__(self, answer: Any, *, gone: bool = False) -> None:
        self.pending = Pending(answer)
        self.asked: list[Settle] = []
        self._gone = gone

    def next_id(self) -> int:
        return 7

    def call(self, question: Settle) -> Pending:
        if self._gone:
            raise LinkLost("gone")
        self.asked.append(question)
        return self.pending


def done(code: LLMStatusCode) -> Done:
    return Done(id=7, code=code)


def test_those_that_are_busy_silent_or_odd_are_left() -> None:
    links: list[Any] = [
        Link(done(LLMStatusCode.LLM_SUCCESS)),
        Link(done(LLMStatusCode.LLM_LINK_BUSY)),
        Link(LinkLost("down meanwhile")),
        Link(TimeoutError()),
        Link(object()),
        Link(None, gone=True),
    ]
    assert settle(links, time.monotonic() + 1) == [links[1], links[3], links[4]]
    assert [link.pending.closed for link in links] == [False, False, False, True, False, False]


@pytest.mark.parametrize("cache_id", [0, 5])
def test_peers_are_told_the_cache_and_the_time(cache_id: int) -> None:
    link: Any = Link(done(LLMStatusCode.LLM_SUCCESS))
    settle([link], time.monotonic() + 2, cache_id)
    (asked,) = link.asked
    assert asked.cache_id == cache_id and 1500 < asked.time_left_ms <= 2000
    settle([link], time.monotonic() - 1)
    assert link.asked[-1].time_left_ms == 1, "at least a moment"


def test_all_are_asked_before_any_is_waited_for() -> None:
    order: list[str] = []

    class Noting(Link):
        def call(self, question: Settle) -> Pending:
            order.append("asked")
            return super().call(question)

    links: list[Any] = [Noting(done(LLMStatusCode.LLM_SUCCESS)) for _ in range(3)]
    for link in links:
        link.pending.wait = lambda deadline, wait=link.pending.wait: (order.append("waited"), wait(deadline))[
            1
        ]
    assert settle(links, time.monotonic() + 1) == []
    assert order == ["asked"] * 3 + ["waited"] * 3


# ---- at the peer ----------------------------------------------------------------------------------------------


class Reading:
    """A flight of a peer that reads a cache, until it is cut or told to end."""

    def __init__(self, engine: Any, link: Any, cache_id: int) -> None:
        from llm_datadist._engine.flights import Flight

        self._state = engine._engine._state
        self.flight = Flight(link, (1,))
        self.flight.reads = cache_id
        self.cut = threading.Event()
        with self._state.lock:
            self._state.flights.begin(self.flight)
        self.flight.on_cut(lambda reason: self.cut.set())

    def end(self) -> None:
        self._state.flights.end(self.flight)


@pytest.fixture
def pair() -> Any:
    with Engines("B", "local") as engines:
        owner, reader = engines.make(1), engines.make(2)
        assert engines.link(reader, 1, owner) == LLMStatusCode.LLM_SUCCESS
        yield owner, reader


def _links(owner: Any, reader: Any) -> tuple[list[Any], Any]:
    (there,) = owner._engine._state.links.links()
    (here,) = reader._engine._state.links.links()
    return [there], here


def test_s5_reads_of_a_withdrawn_cache_are_cut_and_waited_for(pair: Any) -> None:
    links, link = _links(*pair)
    mine, others = Reading(pair[1], link, 5), Reading(pair[1], link, 6)
    assert settle(links, time.monotonic() + SOON_S, 5) == links, "it has not ended yet"
    assert mine.cut.is_set() and not others.cut.is_set()
    error = mine.flight.error
    assert isinstance(error, CacheNotExistError) and "cluster 1" in str(error) and "cache 5" in str(error)
    mine.end()
    assert settle(links, time.monotonic() + 5, 5) == []
    assert others.flight.error is None
    others.end()


def test_s5_a_drain_that_waits_does_not_hold_up_who_frees_memory(pair: Any) -> None:
    links, link = _links(*pair)
    readings = [Reading(pair[1], link, 6) for _ in range(2)]
    answers: list[Any] = []
    drains = [
        threading.Thread(target=lambda: answers.append(settle(links, time.monotonic() + 20)))
        for _ in range(9)
    ]
    for drain in drains:
        drain.start()
    asked = pair[1]._engine._state.links._driver._handler._asked
    assert wait_until(lambda: asked.count == 9), "more than a link may have threads"
    assert settle(links, time.monotonic() + 5, 5) == []
    assert not answers, "drains wait for all that is under way"
    for reading in readings:
        assert not reading.cut.is_set()
        reading.end()
    for drain in drains:
        drain.join(5)
    assert answers == [[]] * 9
