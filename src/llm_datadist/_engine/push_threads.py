"""Threads that read the pushes of peers: so many for a link, and so many for all, of which nobody has the last ones.

Strategy: the last ones are for those that have few; of these, who has waited longest is next. A link that has none
waits for none of the others longer than a turn: what reads one part after the other gives way between two of them, and
a read that takes longer than ``PUSH_TURN_S`` is cut off, of who has most, when all threads that a link could have are
taken.
Threads: any that no signal strikes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llm_datadist._core import limits
from llm_datadist._core.quota import Quota
from llm_datadist._engine.workers import Workers
from llm_datadist._link.link import Link

_LOOK_S = 1.0  # between looks at those that have no thread


@dataclass(slots=True, eq=False)
class _Job:
    link: Link
    run: Callable[[], None]
    cut: Callable[[], None]
    began: float = 0.0


class PushThreads:
    """Runs jobs of links on workers.

    Args:
        workers: Where the threads come from.
        later: Calls a function that does not block after so many seconds.

    Attributes:
        crowded: A link waits that has no thread: who can go on later should.
    """

    def __init__(self, workers: Workers, later: Callable[[float, Callable[[], None]], object]) -> None:
        self._workers = workers
        self._later = later
        self._lock = threading.Lock()
        self._quota = Quota(limits.PUSH_THREADS)
        self._running: dict[_Job, None] = {}
        self._waiting: dict[Link, deque[_Job]] = {}
        self._looks = False  # a look at those that wait is to come
        self.crowded = False

    def submit(self, link: Link, run: Callable[[], None], cut: Callable[[], None]) -> None:
        """Runs ``run`` when it is its turn; ``cut`` ends it early, and may come late."""
        with self._lock:
            self._waiting.setdefault(link, deque()).append(_Job(link, run, cut))
            job = self._take(link) if self._may_begin(link) else None
            look = self._note_crowd(link)
        self._begin(job)
        if look:
            self._later(_LOOK_S, self._look)

    def drop(self, link: Link) -> None:
        """What waits of a link that has gone is not run."""
        with self._lock:
            self._waiting.pop(link, None)

    def _may_begin(self, link: Link) -> bool:
        _, held = self._quota.held(link.host, link)
        return held < limits.JOBS and self._quota.may_take(link.host, link)

    def _take(self, link: Link) -> _Job:
        jobs = self._waiting.pop(link)
        job = jobs.popleft()
        if jobs:
            self._waiting[link] = jobs  # behind those that have waited longer
        self._quota.take(link.host, link)
        self._running[job] = None
        return job

    def _begin(self, job: _Job | None) -> None:
        """Without the lock."""
        if job is not None:
            job.began = time.monotonic()
            self._workers.submit(job, lambda: self._run(job))

    def _run(self, job: _Job) -> None:
        try:
            job.run()
        finally:
            for following in self._end(job):
                self._begin(following)

    def _end(self, job: _Job) -> list[_Job]:
        """Those that may begin now."""
        following = []
        with self._lock:
            del self._running[job]
            self._quota.give(job.link.host, job.link)
            while (link := next(filter(self._may_begin, self._waiting), None)) is not None:
                following.append(self._take(link))
            self.crowded = any(not self._held(link)[1] for link in self._waiting)
        return following

    def _held(self, link: Link) -> tuple[int, int]:
        return self._quota.held(link.host, link)

    def _note_crowd(self, link: Link) -> bool:
        """Whether to look at those that have no thread in a moment."""
        if link not in self._waiting or self._held(link)[1]:
            return False
        self.crowded = True
        looks, self._looks = self._looks, True
        return not looks

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            without = sorted((link for link in self._waiting if not self._held(link)[1]), key=self._held)
            self._looks = bool(without)
            long = [job for job in self._running if now - job.began >= limits.PUSH_TURN_S]
            long.sort(key=lambda job: self._held(job.link), reverse=True)  # of one link, the oldest first
            cut = [
                job for link, job in zip(without, long, strict=False) if self._is_better_off(job.link, link)
            ]
            for job in cut:
                job.began = now  # the next one is another, should it go on
        for job in cut:
            job.cut()
        if without:
            self._later(_LOOK_S, self._look)

    def _is_better_off(self, link: Link, other: Link) -> bool:
        return link.host == other.host or self._held(link)[0] > self._held(other)[0]
