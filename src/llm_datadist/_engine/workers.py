"""Daemon threads for work that must not run on the control thread: receiving pushes, layer-wise tasks, unlinking.

Threads are made on demand and end after a few idle seconds. Jobs are limited per key (a link), so a slow
peer never keeps the jobs of another waiting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from llm_datadist._logs import get_logger

_LOG = get_logger("llm_datadist.engine")
_IDLE_S = 2.0  # a thread without work for so long ends
_PER_KEY = 8  # jobs of one key that run at once: more only share the same link


class Workers:
    """Runs jobs, at most ``per_key`` of one key at a time, in order of their coming."""

    def __init__(self, name: str, per_key: int = _PER_KEY) -> None:
        self._name = name
        self._per_key = per_key
        self._condition = threading.Condition()
        self._ready: deque[tuple[object, Callable[[], None]]] = deque()
        self._waiting: dict[object, deque[Callable[[], None]]] = {}
        self._running: dict[object, int] = {}
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False

    def submit(self, key: object, job: Callable[[], None]) -> bool:
        """Runs ``job`` on a thread of the pool; False after ``close``: it is dropped."""
        with self._condition:
            if self._closed:
                return False
            if self._running.get(key, 0) >= self._per_key:
                self._waiting.setdefault(key, deque()).append(job)
                return True
            self._running[key] = self._running.get(key, 0) + 1
            self._ready.append((key, job))
            if self._idle >= len(self._ready):
                self._condition.notify()
                return True
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left: the job waits for one of ours
            _LOG.error("no thread could be started for a background job; it waits for a free one")
            with self._condition:
                self._threads.discard(thread)
        return True

    def close(self, timeout_s: float) -> None:
        """Drops what has not begun and waits for what runs, at most so long in all."""
        with self._condition:
            self._closed = True
            self._ready.clear()
            self._waiting.clear()
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._threads - {threading.current_thread()}, timeout_s)

    def _work(self) -> None:
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
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
