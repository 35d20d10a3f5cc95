"""Pulls and pushes that go on in the background: each is a task of one entry.

Invariants: a task has its answer only when nothing of it writes any more (``cancel`` waits for that); one
whose turn has not come ends as soon as its flight is cut. At most ``_PER_LINK`` move at once on one link, and
a place is free again before the callbacks of its task run, so callbacks may start and await other tasks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from llm_datadist._core.registry import Record
from llm_datadist._engine.errands import Call
from llm_datadist._engine.flights import LAST_BYTES_S, Flight
from llm_datadist._engine.state import State
from llm_datadist._link.link import Link
from llm_datadist._logs import get_logger
from llm_datadist._waiting import Latch
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.tasks import CacheTask, TaskBook

_LOG = get_logger("llm_datadist.engine")
_PER_LINK = 64  # a thread each: more only share the same link


R = TypeVar("R", contravariant=True)


class Mover(Protocol[R]):
    """What makes one call: the initiator or the pusher."""

    def check(self, request: R) -> Record:
        """The caller's own cache, checked; raises for a bad argument."""

    def begin(self, request: R, record: Record, flight: Flight) -> None:
        """Finds the link and enters the flight."""

    def run(self, request: R, record: Record, flight: Flight, started: float) -> None:
        """Moves the bytes, or raises."""


class Background:
    """The background calls of an engine."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._running: dict[Link, int] = {}
        self._waiting: dict[Link, deque[_Job]] = {}

    def start(self, mover: Mover[R], request: R, what: str, started: float, call: Call) -> CacheTask:
        """Checks the caller's arguments, then works in the background.

        Args:
            mover: Who makes the call.
            request: What is asked for.
            what: It is, for a warning.
            started: When its time began.
            call: The caller's, who may be interrupted.

        Raises:
            CacheNotExistError: The local cache.
            ParamInvalidError: A rule of the caller's side.
        """
        record = mover.check(request)
        flight = Flight(None, (record.cache_id,))
        try:
            mover.begin(request, record, flight)
            task = self._enter(flight, lambda: mover.run(request, record, flight, started), what)
        except LLMException as exc:
            return self._refused(exc, what)
        except BaseException:  # nobody else would end it
            self._state.flights.end(flight)
            raise
        call.on_drop(task.cancel)
        return task

    def _refused(self, error: LLMException, what: str) -> CacheTask:
        """A task that has failed."""
        book = TaskBook(1, _nothing)
        task = self._state.dropped.watch(book, what)
        # Its traceback leads to the call, and that to the task, which would keep itself.
        book.finish(0, error.status_code, error.with_traceback(None))
        return task

    def _enter(self, flight: Flight, call: Callable[[], None], what: str) -> CacheTask:
        job = _Job(self._state, self, flight, call)
        task = self._state.dropped.watch(job.book, what)
        flight.on_cut(lambda _: job.drop())
        with self._lock:
            at_once = self._running.get(flight.link, 0) < _PER_LINK
            if at_once:
                self._running[flight.link] = self._running.get(flight.link, 0) + 1
            else:
                self._waiting.setdefault(flight.link, deque()).append(job)
        if at_once:
            self._submit(job)
        return task

    def leave(self, link: Link) -> None:
        """A call has moved its last byte: the next one of its link may go."""
        with self._lock:
            waiting = self._waiting.get(link)
            job = waiting.popleft() if waiting else None
            if not waiting:
                self._waiting.pop(link, None)
            if job is None:
                self._running[link] -= 1
                if not self._running[link]:
                    del self._running[link]
        if job is not None:
            self._submit(job)

    def _submit(self, job: _Job) -> None:
        self._state.workers.submit(job, job.run, job.refuse)


class _Job:
    """One call."""

    def __init__(
        self, state: State, background: Background, flight: Flight, call: Callable[[], None]
    ) -> None:
        self.book = TaskBook(1, self._cancel, state.run_callbacks, state.do_elsewhere)
        self._state = state
        self._background = background
        self._flight = flight
        self._call = call
        self._lock = threading.Lock()
        self._begun = False  # or dropped
        self._error: BaseException | None = None  # the outcome, once it has ended
        self._ended = Latch()

    def run(self) -> None:
        """The worker's part."""
        taken = self._take()
        if taken:
            self.book.begin(0)
            self._error = self._outcome()
        self._background.leave(self._flight.link)
        if taken:
            self._ended.open()
            self._answer()

    def refuse(self, error: LLMException) -> None:
        """There is no thread for it."""
        if self._take():
            self._state.flights.end(self._flight)
            self._error = error
            self._background.leave(self._flight.link)
            self._ended.open()
            self._answer()

    def drop(self) -> None:
        """The flight was cut: one whose turn has not come ends here."""
        if not self._take():
            return
        self._state.flights.end(self._flight)
        self._error = self._flight.error
        self._ended.open()
        self._answer()

    def _take(self) -> bool:
        with self._lock:
            taken, self._begun = not self._begun, True
        return taken

    def _outcome(self) -> BaseException | None:
        try:
            self._state.flights.fly(self._flight, self._call)
        except Exception as exc:
            if not isinstance(exc, LLMException):
                _LOG.exception("a background transfer failed")
            return exc
        return None

    def _answer(self) -> None:
        error = self._error
        code = LLMStatusCode.LLM_SUCCESS
        if error is not None:
            code = error.status_code if isinstance(error, LLMException) else LLMStatusCode.LLM_FAILED
        self.book.finish(0, code, error)

    def _cancel(self) -> None:
        self._flight.cut(LLMException("cancelled by the caller", status_code=LLMStatusCode.LLM_FAILED))
        here = self._flight.link.on_control_thread()  # which must not block
        if self._ended.wait(0 if here else LAST_BYTES_S):
            self._answer()  # what has come of it, which may be success


def _nothing() -> None:
    return None
