"""Tasks that failed, and that their callers dropped without ever asking for the outcome: a warning for each.

Strategy: a weak reference with a callback that is C code alone notes that a task is gone; while a failed one has not
been asked, a timer on the control thread looks at what was noted. So nothing of ours runs where a task happens
to be dropped: the collector may come under any lock, and an interrupt within a ``__del__`` is lost.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from llm_datadist._logs import get_logger
from llm_datadist.tasks import CacheTask, Fate, TaskBook

_LOG = get_logger("llm_datadist.tasks")
_FIRST_LOOK_S = 0.05
_LONGEST_S = 5.0  # between two looks, when a task that failed is kept and not asked


class _Watch(weakref.ref[CacheTask]):
    """A task that is there, or was."""

    __slots__ = ("fate", "what")
    fate: Fate
    what: str


class Dropped:
    """The tasks of one engine.

    Args:
        call_at: Runs a function on the control thread at an instant of ``time.monotonic()``.
    """

    def __init__(self, call_at: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_at = call_at
        self._lock = threading.Lock()
        self._watched: set[_Watch] = set()
        self._gone: deque[_Watch] = deque()
        self._pause_s = 0.0  # until the next look; 0: none is due

    def watch(self, book: TaskBook, what: str) -> CacheTask:
        """From now on the caller alone keeps that task when it is done; ``what`` says what it is in a warning."""
        watch = _Watch(book.task, self._gone.append)
        watch.what = what
        with self._lock:
            self._watched.add(watch)
        watch.fate = book.watch(self._look_soon)
        self._tell_gone()
        return book.task

    def close(self) -> None:
        """The engine ends: the last look."""
        self._tell_gone()

    def _look_soon(self) -> None:
        with self._lock:
            due, self._pause_s = self._pause_s, _FIRST_LOOK_S
        if not due:
            self._call_at(time.monotonic() + _FIRST_LOOK_S, self._look)

    def _look(self) -> None:
        self._tell_gone()
        with self._lock:
            left = any(watch.fate.error is not None and not watch.fate.asked for watch in self._watched)
            self._pause_s = pause_s = min(2 * self._pause_s, _LONGEST_S) if left else 0.0
        if left:
            self._call_at(time.monotonic() + pause_s, self._look)

    def _tell_gone(self) -> None:
        gone = []
        with self._lock:
            while self._gone:
                gone.append(self._gone.popleft())
            self._watched.difference_update(gone)
        for watch in gone:
            error = watch.fate.error
            if error is not None and not watch.fate.asked:
                _LOG.warning(
                    "%s failed, and its task was dropped without being asked for the outcome: %s",
                    watch.what,
                    error,
                )
