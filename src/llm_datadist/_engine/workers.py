"""Daemon threads for work that must not run on the control thread: receiving pushes, layer-wise tasks, unlinking.

Threads are made on demand and end after a few idle seconds. Jobs are limited per key (a link), so a slow
peer never keeps the jobs of another waiting. Where the system refuses a thread, a job that can be refused is, and
any other waits for a thread of ours or for one that can be started a moment later: none is lost.
Threads: ``submit`` and ``close`` from any that no signal strikes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from llm_datadist._core import limits
from llm_datadist._logs import get_logger
from llm_datadist._shortages import no_thread, start_thread
from llm_datadist.status import LLMException, OutOfMemoryError

_LOG = get_logger("llm_datadist.engine")
_IDLE_S = 2.0  # a thread without work for so long ends
_AGAIN_S = 0.1  # until a thread that could not be started is tried again


class Workers:
    """Runs jobs, at most ``per_key`` of one key at a time, in order of their coming.

    Args:
        name: Of its threads.
        later: Calls a function that does not block after so many seconds.
        per_key: Jobs of one key that run at once.
    """

    def __init__(
        self, name: str, later: Callable[[float, Callable[[], None]], object], per_key: int = limits.JOBS
    ) -> None:
        self._name = name
        self._later = later
        self._per_key = per_key
        self._condition = threading.Condition()
        self._ready: deque[tuple[object, Callable[[], None]]] = deque()
        self._waiting: dict[object, deque[Callable[[], None]]] = {}
        self._running: dict[object, int] = {}
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._starting = 0  # threads that have not looked for a job yet
        self._is_late = False  # one is to be tried again
        self._closed = False

    def submit(
        self, key: object, job: Callable[[], None], refused: Callable[[LLMException], None] | None = None
    ) -> bool:
        """Runs ``job`` on a thread of the pool; False after ``close``: it is dropped.

        ``refused`` is called, here, instead of the job when there is no thread for it. Without it the job waits.
        """
        with self._condition:
            if self._closed:
                return False
            if self._running.get(key, 0) >= self._per_key:
                self._waiting.setdefault(key, deque()).append(job)
                return True
            self._running[key] = self._running.get(key, 0) + 1
            self._ready.append((key, job))
            short = self._find_threads()
            if short is not None and refused is not None:
                self._ready.pop()
                self._end_turn(key)
        if short is not None:
            self._look_again(short)
            if refused is not None:
                refused(no_thread("a transfer in the background"))
        return True

    def _find_threads(self) -> OutOfMemoryError | None:
        """Sees to it that every job that is ready has a thread; why that cannot be. The caller holds the lock."""
        self._condition.notify(len(self._ready))
        while self._idle + self._starting < len(self._ready):
            try:
                self._threads.add(start_thread(self._work, self._name))
            except OutOfMemoryError as error:
                return error
            self._starting += 1
        return None

    def _look_again(self, short: OutOfMemoryError) -> None:
        """In a moment, for the jobs that wait; said once. The caller does not hold the lock."""
        with self._condition:
            was_late, self._is_late = self._is_late, True
        if not was_late:
            _LOG.warning("a background job waits: %s", short)
            self._later(_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        with self._condition:
            self._is_late = False
            short = None if self._closed else self._find_threads()
        if short is not None:
            self._look_again(short)

    def close(self, timeout_s: float) -> None:
        """Drops what has not begun and waits for what runs, at most so long in all."""
        with self._condition:
            self._closed = True
            self._ready.clear()
            self._waiting.clear()
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._threads - {threading.current_thread()}, timeout_s)

    def _work(self) -> None:
        with self._condition:
            self._starting -= 1
        try:
            while (item := self._next()) is not None:
                self._run(*item)
        finally:
            with self._condition:
                self._threads.discard(threading.current_thread())
                self._condition.notify_all()

    def _next(self) -> tuple[object, Callable[[], None]] | None:
        with self._condition:
            self._idle += 1
            self._condition.wait_for(lambda: self._ready or self._closed, _IDLE_S)
            self._idle -= 1
            return self._ready.popleft() if self._ready else None

    def _run(self, key: object, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:  # a SystemExit of user code must not take the key's turn with it
            _LOG.exception("a background job failed; the engine goes on")
        with self._condition:
            waiting = self._waiting.get(key)
            if waiting:
                self._ready.append((key, waiting.popleft()))
                if not waiting:
                    del self._waiting[key]
                return
            self._end_turn(key)

    def _end_turn(self, key: object) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
