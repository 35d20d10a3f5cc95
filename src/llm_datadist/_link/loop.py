"""The control thread: sockets, timers and functions of other threads, one at a time.

Strategy: timers due at the instant *before* a poll run after what that poll found. So whatever had arrived
before a timer is due is handled before it, also when this process was stopped or starved meanwhile; a peer
is never judged by bytes that nobody read. The time by which a turn came late is told to ``on_late``.
Invariants: no callback's exception ends the thread; no waiting without the selector.
Threads: ``call_soon``, ``call_at``, ``cancel`` and ``stop`` from any; the rest on the control thread (or
before ``start``).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from llm_datadist._logs import get_logger
from llm_datadist._shortages import start_thread
from llm_datadist._waiting import guard

LATE_S = 0.25  # a turn that comes later than this was held up: by a stop, by the GIL, by the machine
ERROR_PAUSE_S = 0.05  # for a socket whose callback failed, and for a selector, so that a fault is not a spin
MIN_PURGE = 64  # cancelled timers that may stay in the heap before it is rebuilt

_log = get_logger("llm_datadist.link")


class TimerHandle:
    """A timer that can be cancelled, from any thread."""

    __slots__ = ("_fn", "_loop")

    def __init__(self, loop: ControlLoop, fn: Callable[[], None]) -> None:
        self._loop = loop
        self._fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        """It will not run any more. Idempotent."""
        if self._fn is not None:
            self._fn = None
            self._loop.forget_cancelled()

    def take(self) -> Callable[[], None] | None:
        """What is to run, once; None when cancelled. For the loop alone."""
        fn, self._fn = self._fn, None
        return fn

    @property
    def live(self) -> bool:
        """Whether it is still to run."""
        return self._fn is not None


class ControlLoop:
    """One daemon thread with a selector, a timer heap and a queue of calls.

    Attributes:
        polled_at: An instant before the last poll: what had arrived by then has been handled. The clock by
            which timers are run and peers are judged; now may be much later.
        before_wait: Called before each wait.
        on_late: Called with the seconds by which a turn came late.
    """

    def __init__(self, name: str) -> None:
        self._selector: selectors.BaseSelector
        self._wake_fd = -1
        self._lock = guard(self)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._woken = False
        self._ending = False
        self._closed = True
        self._name = name
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        self._resting: dict[socket.socket, TimerHandle] = {}
        self.polled_at = 0.0
        self.before_wait: Callable[[], None] = lambda: None
        self.on_late: Callable[[float], None] = lambda seconds: None

    def open(self) -> None:
        """Takes its descriptors; then sockets can be registered.

        Raises:
            OSError: There are none; it holds nothing.
        """
        with contextlib.ExitStack() as undo:
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake_fd)
            self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
            undo.pop_all()
        self._closed = False

    # ---- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread.

        Raises:
            OutOfMemoryError: There is none; it is still to be started, or stopped.
        """
        self._thread = start_thread(self._run, self._name)

    @property
    def started(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    @property
    def is_open(self) -> bool:
        """Whether it holds descriptors."""
        return not self._closed

    def on_thread(self) -> bool:
        """Whether the caller is the control thread."""
        return threading.get_ident() == self._thread_id

    def call_soon(self, fn: Callable[[], None]) -> bool:
        """Runs ``fn`` on the control thread; False when it has ended and never will."""
        with self._lock:
            if self._ending:
                return False
            self._calls.append(fn)
            self._wake()
        return True

    def call_at(self, when: float, fn: Callable[[], None]) -> TimerHandle:
        """Runs ``fn`` on the control thread at an instant of ``time.monotonic()``."""
        handle = TimerHandle(self, fn)
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._order), handle))
            if self._timers[0][2] is handle:
                self._wake()
        return handle

    def forget_cancelled(self) -> None:
        """A timer was cancelled: once they are the most, they leave the heap."""
        with self._lock:
            self._cancelled += 1
            if self._cancelled >= MIN_PURGE and self._cancelled * 2 > len(self._timers):
                self._timers = [entry for entry in self._timers if entry[2].live]
                heapq.heapify(self._timers)
                self._cancelled = 0

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the calls queued so far, and frees its descriptors. Idempotent."""
        with self._lock:
            self._ending = True
            self._wake()
        if self._thread is None:
            self._close()
        elif not self.on_thread():
            self._thread.join(timeout_s)

    def close_after_fork(self) -> None:
        """In a forked child, where the thread does not exist: closes the descriptors, touches no lock."""
        if not self._closed:
            self._closed = True
            os.close(self._wake_fd)
            self._selector.close()  # close(2) alone; unregistering would act on the parent

    def _wake(self) -> None:
        if not self._woken and not self._closed and not self.on_thread():
            # First: an interrupt between the two costs a turn, not the wake-up of every later call.
            os.eventfd_write(self._wake_fd, 1)
            self._woken = True

    # ---- control thread ----------------------------------------------------------------------------

    def register(self, sock: socket.socket, events: int, fn: Callable[[int], None]) -> None:
        """Calls ``fn(ready events)`` whenever ``sock`` is ready; again with other events: replaced."""
        self._end_rest(sock)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, fn)
        else:
            self._selector.register(sock, events, fn)

    def unregister(self, sock: socket.socket) -> None:
        """Ends ``register``; before the socket is closed. Idempotent."""
        self._end_rest(sock)
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            return

    def rest(self, sock: socket.socket, seconds: float) -> None:
        """Leaves a registered socket alone for so long, whatever it has. ``register`` and ``unregister`` end that."""
        fd = sock.fileno()
        key = self._selector.get_map().get(fd) if fd >= 0 else None
        if key is None or key.fileobj is not sock:  # it is closed, or was never there
            return
        self._selector.unregister(sock)

        def resume() -> None:
            del self._resting[sock]
            try:
                self._selector.register(sock, key.events, key.data)
            except OSError:  # the system has no room for it now
                self._resting[sock] = self.call_at(time.monotonic() + seconds, resume)

        self._resting[sock] = self.call_at(time.monotonic() + seconds, resume)

    def _end_rest(self, sock: socket.socket) -> None:
        timer = self._resting.pop(sock, None)
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        self._thread, self._thread_id = threading.current_thread(), threading.get_ident()
        due_by = time.monotonic()
        while not self._ending or self._calls:
            before = self.polled_at = time.monotonic()
            if before - due_by > LATE_S:
                self._guard(lambda late=before - due_by: self.on_late(late))  # type: ignore[misc]
            self._guard(self.before_wait)
            wait_s = self._next_wait(before)
            due_by = before if wait_s is None else before + wait_s
            if not self._poll(wait_s):
                continue
            if wait_s is None:
                due_by = time.monotonic()
            self._run_calls()
            self._run_timers(before)
        self._close()

    def _next_wait(self, now: float) -> float | None:
        with self._lock:
            while self._timers and not self._timers[0][2].live:
                heapq.heappop(self._timers)
                self._cancelled = max(0, self._cancelled - 1)
            if self._calls or self._ending:
                return 0.0
            return max(0.0, self._timers[0][0] - now) if self._timers else None

    def _poll(self, wait_s: float | None) -> bool:
        try:
            ready = self._selector.select(wait_s)
        except Exception:
            _log.exception("the selector of the control thread failed")
            time.sleep(ERROR_PAUSE_S)
            return False
        for key, events in ready:
            if self._selector.get_map().get(key.fd) == key:  # an earlier callback may have closed it
                well = self._guard(lambda key=key, events=events: key.data(events))  # type: ignore[misc]
                if not well and isinstance(key.fileobj, socket.socket):  # it may be ready still, and for ever
                    self.rest(key.fileobj, ERROR_PAUSE_S)
        return True

    def _on_wake(self, events: int) -> None:
        with self._lock:
            self._woken = False
            os.eventfd_read(self._wake_fd)

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # those that came meanwhile wait for the next turn
            self._guard(self._calls.popleft())

    def _run_timers(self, now: float) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                fn = heapq.heappop(self._timers)[2].take()
                if fn is None:
                    self._cancelled = max(0, self._cancelled - 1)
            if fn is not None:
                self._guard(fn)

    def _guard(self, fn: Callable[[], None]) -> bool:
        try:
            fn()
        except Exception:
            _log.exception("a callback on the control thread failed; the thread goes on")
            return False
        return True

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._selector.close()
            os.close(self._wake_fd)
