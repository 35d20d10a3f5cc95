"""Row G18: the threads that read pushes are bounded for all links, and none waits for ever behind those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist._core.quota import Quota
from llm_datadist._engine import push_threads as module
from llm_datadist._engine.push_threads import PushThreads

THREADS = 32


class Link:
    def __init__(self, host: str) -> None:
        self.host = host


class Bench:
    """Jobs that run until they are told to end; what is cut ends. Time is told by the test."""

    def __init__(self) -> None:
        self.threads = PushThreads(self, self._later)  # type: ignore[arg-type]
        self.running: dict[Any, tuple[Link, Callable[[], None]]] = {}
        self.cut: list[Link] = []
        self.looks: list[Callable[[], None]] = []

    def submit(self, key: Any, run: Callable[[], None]) -> None:
        """As ``Workers``."""
        self.running[key] = key.link, run

    def _later(self, seconds: float, fn: Callable[[], None]) -> None:
        self.looks.append(fn)

    def push(self, link: Link, count: int = 1) -> Link:
        for _ in range(count):
            self.threads.submit(link, lambda: None, lambda: self._end_one_that_was_cut(link))  # type: ignore[arg-type]
        return link

    def _end_one_that_was_cut(self, link: Link) -> None:
        self.cut.append(link)
        self.end(link)

    def end(self, link: Link) -> None:
        key = next(key for key, (of, _) in self.running.items() if of is link)
        self.running.pop(key)[1]()

    def of(self, link: Link) -> int:
        return sum(1 for of, _ in self.running.values() if of is link)

    def at(self, host: str) -> int:
        return sum(1 for of, _ in self.running.values() if of.host == host)

    def look(self) -> None:
        looks, self.looks = self.looks, []
        for look in looks:
            look()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(limits, "PUSH_THREADS", THREADS)
    return now


@pytest.fixture
def bench(clock: list[float]) -> Bench:
    return Bench()


def test_g18_a_link_has_so_many_and_its_others_follow_in_order(bench: Bench) -> None:
    link = bench.push(Link("a"), limits.JOBS + 2)
    assert bench.of(link) == limits.JOBS
    first = list(bench.running)
    bench.end(link)
    assert bench.of(link) == limits.JOBS and list(bench.running)[:-1] == first[1:]


@pytest.mark.parametrize("links", [1, 3, 20, 100])
def test_g18_links_of_one_address_leave_half_to_others(bench: Bench, links: int) -> None:
    for _ in range(links):
        bench.push(Link("hostile"), limits.JOBS)
    assert bench.at("hostile") <= THREADS // 2
    honest = [bench.push(Link("honest"), limits.JOBS) for _ in range(3)]
    assert bench.of(honest[0]) >= THREADS // 8 and all(bench.of(link) for link in honest)
    assert not bench.cut


def test_g18_all_together_have_no_more_than_the_limit(bench: Bench) -> None:
    for number in range(200):
        bench.push(Link(f"host {number}"), limits.JOBS)
    assert len(bench.running) == THREADS


def test_g18_the_last_ones_are_for_those_that_have_few(bench: Bench) -> None:
    hostile = [bench.push(Link("hostile"), 3 * limits.JOBS) for _ in range(20)]
    honest = [bench.push(Link(f"honest {number}"), 2 * limits.JOBS) for number in range(4)]
    last = bench.push(Link("honest 0"))
    for _ in range(4):
        bench.end(next(link for link in hostile if bench.of(link)))
    assert bench.of(last) == 1
    assert all(bench.of(link) for link in honest)


@pytest.mark.rule("S.29")
def test_g18_a_link_without_a_thread_gets_one_of_who_has_most(bench: Bench, clock: list[float]) -> None:
    """Links of one address have taken all that it may have, and their reads do not end."""
    for _ in range(20):
        bench.push(Link("address"), limits.JOBS)
    neighbour = bench.push(Link("address"))
    other = bench.push(Link("other"), 2)
    assert bench.of(neighbour) == 0 and bench.threads.crowded and bench.of(other) == 2
    bench.look()
    assert not bench.cut, "not before its turn is over"
    for _ in range(20):
        clock[0] += limits.PUSH_TURN_S
        bench.look()
        if bench.of(neighbour):
            break
    assert bench.of(neighbour) == 1
    assert {link.host for link in bench.cut} == {"address"}
    assert bench.at("address") <= THREADS // 2


def test_g18_nobody_is_cut_for_who_has_more(bench: Bench, clock: list[float]) -> None:
    """New links do not take the threads of addresses that have fewer."""
    few = [bench.push(Link(f"few {number}"), 2) for number in range(3)]
    for _ in range(50):
        bench.push(Link("hostile"), limits.JOBS)
    for _ in range(5):
        clock[0] += limits.PUSH_TURN_S
        bench.look()
    assert not [link for link in bench.cut if link in few]
    assert bench.cut, "its own links take turns"


def test_g18_there_are_no_looks_when_nobody_waits(bench: Bench, clock: list[float]) -> None:
    links = [bench.push(Link("a"), limits.JOBS) for _ in range(10)]
    bench.look()
    for link in links:
        while bench.of(link):
            bench.end(link)
    bench.look()
    assert not bench.looks and not bench.threads.crowded and not bench.running


def test_g18_what_waits_of_a_link_that_has_gone_is_not_run(bench: Bench) -> None:
    link = bench.push(Link("a"), limits.JOBS + 5)
    bench.threads.drop(link)  # type: ignore[arg-type]
    for _ in range(limits.JOBS):
        bench.end(link)
    assert not bench.running and not bench.threads._waiting


def test_g18_a_quota_forgets_who_has_none() -> None:
    quota = Quota(4)
    assert quota.may_take("a", 1)
    quota.take("a", 1)
    quota.take("a", 1)
    assert not quota.may_take("a", 2) and quota.may_take("b", 3)
    assert quota.held("a", 1) == (2, 2)
    quota.give("a", 1)
    quota.give("a", 1)
    assert quota.taken == 0 and not quota._at and not quota._of
