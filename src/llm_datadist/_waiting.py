"""How threads wait for each other so that no interrupt breaks it.

An exception of a signal handler comes between any two calls of the main thread. ``threading.Event`` and
``Condition`` are Python: one that comes inside them leaves their lock taken, or lets go of one that is free. A
plain lock is C: an ``acquire`` has it or has it not, and ``with lock:`` always lets go. So a caller's thread waits
by ``acquire`` of a lock of its own, which whoever it waits for releases, and holds no other lock meanwhile.

A handler may call us as well, and what it has interrupted may be a call of ours that holds a lock: whoever needs it
waits for the handler, so the handler must not wait for them. So the locks within which a caller's thread looks for
signals are guards, whose thread is known.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from llm_datadist.status import LinkBusyError

# Of one sleep: an interrupt may have kept a thread from waking others, and a signal that comes just before a thread
# sleeps does not wake it.
_LONGEST_S = 0.1
_guards: dict[threading.RLock, weakref.ref[object]] = {}  # and who has them
_OURS = str(Path(__file__).parent)
_is_mine: Any = type(threading.RLock())._is_owned  # type: ignore[attr-defined]  # as ``threading.Condition`` asks


def guard(owner: object) -> threading.RLock:
    """A lock within which a caller's thread may be interrupted, as long as ``owner`` lives.

    A handler's call does not wait for it, and finds what it guards as the step before has left it.
    """
    lock = threading.RLock()
    _guards[lock] = weakref.ref(owner, partial(_guards.pop, lock))  # C: it is called anywhere
    return lock


def is_within() -> bool:
    """Whether this thread holds a guard: then a handler has interrupted its call, and calls us."""
    if not any(map(_is_mine, list(_guards))):
        return False
    if sys.version_info >= (3, 11) or _has_interrupted(sys._getframe(1)):
        return True
    _release_left()
    return False


def _has_interrupted(frame: FrameType | None) -> bool:
    """Whether the call of ours to which this frame belongs was made, from code of others, within another one."""
    ours = True
    while frame is not None:
        before, ours = ours, frame.f_code.co_filename.startswith(_OURS)
        if ours and not before:
            return True
        frame = frame.f_back
    return False


def _release_left() -> None:
    """Python 3.10 looks for signals before ``__exit__`` as well: a second one leaves the lock of a ``with`` taken."""
    for lock in list(_guards):
        while _is_mine(lock):
            lock.release()


def check_outside(what: str) -> None:
    """Refuses what a thread that holds a guard must not wait for, or begin.

    Raises:
        LinkBusyError: It does.
    """
    if is_within():
        raise busy_within(what, "nothing was done; call it again when the handler has returned")


def busy_within(what: str, rest: str) -> LinkBusyError:
    """What a call of a signal handler ends with when nobody can do it meanwhile."""
    return LinkBusyError(
        f"{what} was called in a signal handler, which has interrupted this thread in the middle of another call of "
        f"this library, on which the engine waits: {rest}"
    )


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release_all(waiting: deque[threading.Lock]) -> None:
    while waiting:
        try:
            waiting.popleft().release()
        except IndexError:  # another thread woke the last one
            return


class Lasting:
    """What lasts as long as a call: it is over then, whoever says so or has no chance to.

    A subclass whose ``__init__`` does not call this one sets ``_under_way`` to None.
    """

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        self._under_way: weakref.ref[threading.Lock] | None = None

    def during(self) -> threading.Lock:
        """Taken by the call from before its first step to after its last.

        Its ``with`` alone holds the lock: of two signals Python 3.10 may run the second before ``__exit__``, and what
        that leaves taken goes with the frame.
        """
        lock = threading.Lock()
        self._under_way = weakref.ref(lock)
        return lock

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        if self._under_way is None:
            return False
        lock = self._under_way()
        return lock is None or not lock.locked()


class Latch:
    """Opens once, for any number of waiters. Threads: any."""

    __slots__ = ("_open", "_waiting")

    def __init__(self) -> None:
        self._open = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._open

    def open(self) -> None:
        """Lets all waiters go, now and later. Idempotent."""
        self._open = True
        _release_all(self._waiting)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is open; False when the time was over before. None: as long as it takes."""
        if self._open:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        mine = _taken()
        self._waiting.append(mine)
        while not self.is_open:  # else ``open`` may not have seen us
            left = _LONGEST_S if deadline is None else min(_LONGEST_S, deadline - time.monotonic())
            if left <= 0:
                return False
            mine.acquire(timeout=left)
        return True


class Changes:
    """Wakes those who wait for what a lock guards to change; they look again every ``longest_s`` in any case.

    Threads: ``notify_all`` and ``ticket`` any. ``wait`` and ``wait_for`` let go of the lock and take it again, which an
    interrupt may come between: they are for threads that no signal strikes.
    """

    __slots__ = ("_lock", "_longest_s", "_waiting")

    def __init__(self, lock: threading.Lock | threading.RLock, longest_s: float = _LONGEST_S) -> None:
        self._lock = lock
        self._longest_s = longest_s
        self._waiting: deque[threading.Lock] = deque()

    def notify_all(self) -> None:
        """Something has changed."""
        _release_all(self._waiting)

    def ticket(self) -> Ticket:
        """For one sleep, outside the lock under which it was taken: until the next change after that."""
        return Ticket(self._waiting, self._longest_s)

    def wait(self, timeout_s: float) -> None:
        """Sleeps until something changes, a moment at most. The caller holds the lock."""
        mine = self.ticket()
        self._lock.release()
        try:
            mine.sleep(timeout_s)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], object], timeout_s: float) -> bool:
        """Waits until it holds; whether it does at the end. The caller holds the lock."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left)
        return True


class Ticket:
    """One sleep of one waiter. Made by ``Changes.ticket``."""

    __slots__ = ("_longest_s", "_mine", "_waiting")

    def __init__(self, waiting: deque[threading.Lock], longest_s: float) -> None:
        self._longest_s = longest_s
        self._mine = _taken()
        self._waiting = waiting
        waiting.append(self._mine)

    def sleep(self, timeout_s: float) -> None:
        """Returns at the next change, after that time, or earlier: the waiter looks again."""
        if not self._mine.acquire(timeout=min(max(0.0, timeout_s), self._longest_s)):
            with suppress(ValueError):  # it was woken after all
                self._waiting.remove(self._mine)
