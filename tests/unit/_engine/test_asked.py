"""Row G18: however many questions wait for the end of transfers, one thread answers them, each link's in its turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist._engine import asked as module
from llm_datadist._engine.asked import Asked, Question
from llm_datadist._waiting import Changes
from llm_datadist.status import LLMStatusCode

SUCCESS, BUSY = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_BUSY


class Link:
    def __init__(self, host: str) -> None:
        self.host = host


class Asks(Question):
    """Is over when the test says so."""

    def __init__(self, link: Link, looks: Counter[str], time_left_ms: int = 10**6) -> None:
        super().__init__(link, 1, time_left_ms)  # type: ignore[arg-type]
        self._looks = looks
        self.over = False
        self.begun = 0
        self.answers: list[LLMStatusCode] = []

    def is_over(self, now: float) -> bool:
        self._looks[self.link.host] += 1
        return self.over

    def begin(self) -> None:
        self.begun += 1

    def answer(self, code: LLMStatusCode, text: str = "") -> None:
        self.answers.append(code)


class Bench:
    """Questions on a clock that a test moves; it looks when the test says so."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.jobs: list[Callable[[], None]] = []
        state = SimpleNamespace(lock=lock, condition=Changes(lock), workers=self)
        self.asked = Asked(state)  # type: ignore[arg-type]
        self.looks: Counter[str] = Counter()

    def submit(self, key: Any, job: Callable[[], None]) -> None:
        """As ``Workers``."""
        self.jobs.append(job)

    def ask(self, link: Link, **more: Any) -> Asks:
        question = Asks(link, self.looks, **more)
        self.asked.put(question)
        return question

    def look(self, now: float) -> list[Question]:
        every: list[Question] = []
        more = True
        while more:
            over, late, more = self.asked._look(now)
            every += over + late
        return every


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)  # type: ignore[attr-defined]
    return Bench()


def test_what_is_over_is_answered_at_once(bench: Bench) -> None:
    question = Asks(Link("a"), bench.looks)
    question.over = True
    bench.asked.put(question)
    assert question.answers == [SUCCESS] and not question.begun and not bench.jobs


def test_g18_all_questions_have_one_thread(bench: Bench) -> None:
    asked = [bench.ask(Link(f"a{host}")) for host in range(50) for _ in range(3)]
    assert len(bench.jobs) == 1 and all(question.begun == 1 for question in asked)
    for question in asked:
        question.over = True
    bench.jobs[0]()
    assert all(question.answers == [SUCCESS] for question in asked)
    assert bench.asked.count == 0
    bench.ask(Link("a"))
    assert len(bench.jobs) == 2, "it has ended, and there is another"


def test_g17_a_link_has_so_many_that_wait(bench: Bench) -> None:
    link = Link("a")
    asked = [bench.ask(link) for _ in range(limits.ASKED + 1)]
    assert asked[-1].answers == [BUSY] and not asked[-1].begun
    assert not any(question.answers for question in asked[:-1])
    assert not bench.ask(Link("a")).answers, "another link has its own"


def test_who_asks_longer_than_its_time_is_told_so(bench: Bench) -> None:
    link = Link("a")
    short, long = bench.ask(link, time_left_ms=1000), bench.ask(link)
    assert bench.look(100.5) == [] and bench.look(102.0) == [short]
    assert bench.asked.count == 1 and not long.answers


def test_g18_looks_are_divided_among_addresses_and_their_links(bench: Bench) -> None:
    """Twenty links with as many questions as they may have, beside a link with one."""
    for _ in range(20):
        link = Link("hostile")
        for _ in range(limits.ASKED):
            bench.ask(link)
    bench.ask(Link("honest"))
    seconds, now = 10.0, 100.0
    bench.look(now)
    bench.looks.clear()
    while now < 100.0 + seconds:
        now += 0.001
        bench.look(now)
    assert bench.looks["honest"] >= 0.4 * limits.LOOKS * seconds * 0.5
    assert sum(bench.looks.values()) <= limits.LOOKS * seconds + 20 * limits.ASKED


def test_g18_the_lock_is_held_for_a_few_looks_at_a_time(bench: Bench) -> None:
    for _ in range(20):
        link = Link("hostile")
        for _ in range(limits.ASKED):
            bench.ask(link)
    bench.looks.clear()
    *_, more = bench.asked._look(100.0)
    assert more and bench.looks["hostile"] <= 2 * limits.ASKED
