"""Questions of peers that wait for the end of transfers: one thread for all of them, however many there are.

Strategy: each is looked at when it comes, and then when something has changed. Looks are bounded in number, for all
together, and divided: among addresses, among the links of one, among the questions of a link.
Threads: ``put`` on the control thread; the later looks on a worker, of which there is one while there are questions.
"""

from __future__ import annotations

import math
import time
from collections import Counter

from llm_datadist._core import limits
from llm_datadist._engine.state import State, tell
from llm_datadist._link.link import Link
from llm_datadist._waiting import Latch
from llm_datadist._wire.messages import Done
from llm_datadist.status import LLMStatusCode

_AT_ONCE = 64  # looks under the lock


class Question:
    """What a peer has asked: yes once it is so, busy at the end of its time.

    Args:
        link: Over which.
        message_id: Of what asked it.
        time_left_ms: How long its answer has time.

    Attributes:
        deadline: The end of that.
        ends_at: When something ends that it waits for, whether or not anything changes.
    """

    def __init__(self, link: Link, message_id: int, time_left_ms: int) -> None:
        self.link = link
        self._message_id = message_id
        self.deadline = self.ends_at = time.monotonic() + max(0, time_left_ms) / 1000

    def is_over(self, now: float) -> bool:
        """Whether it is so. The caller holds the engine's lock."""
        raise NotImplementedError

    def begin(self) -> None:
        """It was not answered at once: hastens what it waits for. The caller holds no lock."""

    def answer(self, code: LLMStatusCode, text: str = "") -> None:
        """Once."""
        tell(self.link, Done(id=self._message_id, code=code, text=text))


class _Group:
    """The questions of one link."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.due_at = -math.inf
        self.ends_at = math.inf  # the first that ends by itself


class Asked:
    """The questions of all peers of an engine."""

    def __init__(self, state: State) -> None:
        self._lock = state.lock
        self._changes = state.condition
        self._workers = state.workers
        self._groups: dict[Link, _Group] = {}
        self._fresh = Latch()  # opens when another question comes
        self._works = False

    @property
    def count(self) -> int:
        """How many wait."""
        with self._lock:
            return sum(len(group.questions) for group in self._groups.values())

    def put(self, question: Question) -> None:
        """Answers it now or later."""
        with self._lock:
            over = question.is_over(time.monotonic())
            group = self._groups.get(question.link)
            full = group is not None and len(group.questions) >= limits.ASKED
        if over:
            question.answer(LLMStatusCode.LLM_SUCCESS)
            return
        if full:
            text = f"{limits.ASKED} questions of this link wait for the end of transfers; ask again later"
            question.answer(LLMStatusCode.LLM_LINK_BUSY, text)
            return
        question.begin()
        with self._lock:
            group = self._groups.setdefault(question.link, _Group())
            group.questions.append(question)
            group.ends_at = min(group.ends_at, question.ends_at)
            works, self._works = self._works, True
            self._fresh.open()
        if not works:
            self._workers.submit(self, self._work)

    def _work(self) -> None:
        works = True
        while works:
            with self._lock:
                fresh = self._fresh = Latch()
                change = self._changes.ticket()
                now = time.monotonic()
                over, late, more = self._look(now)
                groups = self._groups.values()
                works = self._works = bool(groups)
                due_at = min((group.due_at for group in groups), default=now)
                ends_at = min((group.ends_at for group in groups), default=now)
            for question in over:
                question.answer(LLMStatusCode.LLM_SUCCESS)
            for question in late:
                question.answer(LLMStatusCode.LLM_LINK_BUSY, "transfers are in flight")
            if works and not more and not fresh.wait(max(0.0, due_at - time.monotonic())):
                change.sleep(ends_at - time.monotonic())

    def _look(self, now: float) -> tuple[list[Question], list[Question], bool]:
        """Those that are over, those whose time is (they leave), and whether others are due as well.

        The caller holds the lock, which is not held for long however many are due.
        """
        over: list[Question] = []
        late: list[Question] = []
        links_at = Counter(link.host for link in self._groups)
        alone, looks = len(self._groups) == 1, 0
        for link, group in list(self._groups.items()):
            if group.due_at > now:
                continue
            if looks >= _AT_ONCE:
                return over, late, True
            looks += len(group.questions)
            asked, group.questions = group.questions, []
            for question in asked:
                if question.is_over(now):
                    over.append(question)
                elif now >= question.deadline:
                    late.append(question)
                else:
                    group.questions.append(question)
            group.ends_at = min((question.ends_at for question in group.questions), default=math.inf)
            if not group.questions:
                del self._groups[link]
            elif not alone or len(asked) > 1:
                group.due_at = now + len(asked) * links_at[link.host] * len(links_at) / limits.LOOKS
        return over, late, False
