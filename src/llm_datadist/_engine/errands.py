"""Calls that change state, done on a thread that no signal strikes, for a caller that waits in C.

An exception of a signal handler comes between any two steps of the main thread, and of no other. So what takes
more than one step is an errand: the caller makes it, hands it in and waits on a plain lock. An interrupt of that
wait cuts the errand (whoever it waits for is not waited for any more), waits for its end and has its effect
undone, as the caller never gets its result; then it goes on.

Strategy: each errand is done once, by whoever takes it out of its own list, which is one step. What it gave counts
as delivered by one assignment (``kept``), after which nothing looks for signals until the caller has it; the other
way is one assignment too (``dropped``). The thread of an errand that can be undone waits to see which of them comes.
Threads: errands are handed in from any; they may block, so each has a thread while it is done.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from llm_datadist._logs import get_logger
from llm_datadist._shortages import no_thread, start_thread
from llm_datadist._waiting import Latch, busy_within, is_within
from llm_datadist.status import EngineFinalizedError, LLMException, LLMStatusCode, OutOfMemoryError

E = TypeVar("E")
T = TypeVar("T")
P = ParamSpec("P")

_LOG = get_logger("llm_datadist.engine")
# Threads: while one or two see whether their callers got the result, another takes the next errand.
_WAITING = 3
_FIRST_LOOK_S = 0.00005  # what a caller takes to wake and take its result; doubled with each look
_LONGEST_LOOK_S = 0.02
_LAST_STEPS_S = 0.05  # of a thread that has answered
_STARTER_LOOK_S = 0.1  # whether the thread that starts another is still there


class Call(Protocol):
    """What a job is told of whoever wants its result.

    Attributes:
        dropped: Nobody does any more: what it waits for is not to be waited for.
    """

    dropped: bool

    def on_cut(self, cancel: Callable[[], object]) -> None:
        """See ``Errand.on_cut``."""

    def on_drop(self, undo: Callable[[], object]) -> None:
        """See ``Errand.on_drop``."""


def interrupted() -> LLMException:
    """What is cut off with the call of a caller who is not there any more."""
    return LLMException("its caller was interrupted", status_code=LLMStatusCode.LLM_FAILED)


class Errand(Generic[T]):
    """One call.

    Args:
        name: Of the call, for texts.
        desk: Whose threads do it.
        job: Does it; is given the errand, to say how it is cut and undone.
        limit_s: How long the caller waits at most, and what it raises then; None: until it is done.
        or_here: Where there is no thread, the caller does it.
        here: The caller does it in any case: there is nothing to change.

    Attributes:
        threads: System ids of those that it has for itself.
        kept: The caller has the result.
        dropped: The caller will not get it; what the job waits for is not to be waited for any more.
    """

    def __init__(
        self,
        name: str,
        desk: Desk,
        job: Callable[[Errand[T]], T],
        limit_s: tuple[float, Exception] | None = None,
        *,
        or_here: bool = False,
        here: bool = False,
    ) -> None:
        self.name = name
        self.or_here = or_here
        self.here = here
        self.threads: list[int] = []
        self.kept = False
        self.dropped = False
        self._desk = desk
        self._job = [job]  # taken out by who does it
        self._undo: list[Callable[[], object]] = []  # likewise
        self._cancels: list[Callable[[], object]] = []
        self._limit_s: float | None = limit_s[0] if limit_s else None
        self._late: Exception | None = limit_s[1] if limit_s else None
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._answered = Latch()
        self._ended = Latch()

    # ---- the caller ----------------------------------------------------------------------------------------

    def run(self) -> T:
        """Has it done, and returns or raises what came out.

        Raises:
            OutOfMemoryError: There is no thread for it. Nothing was done.
            LinkBusyError: The engine waits for this thread, which a signal handler has interrupted.
        """
        if not self.here and is_within():
            self._refuse_within()
        self._desk.hand_in(self)
        if not self._answered.wait(self._limit_s) and self._late is not None:
            self._limit_s = 0.0
            raise self._late
        self._see_off()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback leads to this frame
        return self._results[0]

    def _refuse_within(self) -> None:
        """What has a limit is as when that is over: it goes on."""
        if self._late is None:
            raise busy_within(self.name, "nothing was done; call it again when the handler has returned")
        self._desk.hand_in(self)
        self._limit_s = 0.0
        raise busy_within(self.name, "it goes on when the handler has returned")

    def _see_off(self) -> None:
        """Threads of its own are to be gone when the call has ended."""
        patience = time.monotonic() + _LAST_STEPS_S
        for thread_id in self.threads:
            while os.path.exists(f"/proc/self/task/{thread_id}") and time.monotonic() < patience:
                time.sleep(_FIRST_LOOK_S)

    def settle(self) -> None:
        """The caller will not get the result: cuts, and waits until what was done is undone."""
        self.dropped = True
        if self._limit_s != 0.0 and _taken_from(self._job) is not None:
            return  # nobody has begun, and nobody will; what is late goes on
        self._desk.hand_in(Errand(self.name, self._desk, lambda _: self._cut(), or_here=True))
        if self._ended.wait(self._limit_s) and self._undo:
            Errand(self.name, self._desk, lambda _: self._take_back()).run()

    def _cut(self) -> None:
        for cancel in self._cancels:
            cancel()

    # ---- its thread ----------------------------------------------------------------------------------------

    def on_cut(self, cancel: Callable[[], object]) -> None:
        """A cut calls ``cancel``, at once and here if it was cut before."""
        # Noted, then looked at; ``settle`` does both the other way round, so that one of the two sees the other.
        self._cancels.append(cancel)
        if self.dropped:
            cancel()

    def on_drop(self, undo: Callable[[], object]) -> None:
        """What takes back that which the job has done."""
        self._undo.append(undo)

    def do(self, *, is_alone: bool = False) -> None:
        """Does it, unless somebody has. ``is_alone``: this thread must not wait for the caller's."""
        job = _taken_from(self._job)
        if job is None:
            return
        try:
            self._results.append(job(self))
        except BaseException as exc:
            self._error = exc
            self._take_back()  # what it had done by then
        self._answered.open()
        if self._undo and not is_alone:
            self._wait_for_verdict()
            if self.dropped:
                self._take_back()
        self._ended.open()

    def refuse(self, error: LLMException) -> None:
        """There is no thread for it."""
        if _taken_from(self._job) is not None:
            self._error = error
            self._answered.open()
            self._ended.open()

    def _wait_for_verdict(self) -> None:
        """The caller cannot say it by a call: a signal may come between that and the return."""
        pause_s = _FIRST_LOOK_S
        while not self.kept and not self.dropped:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _take_back(self) -> None:
        undo = _taken_from(self._undo)
        if undo is None:
            return
        try:
            undo()
        except EngineFinalizedError:
            return  # everything has been
        except Exception:
            _LOG.exception("what an interrupted %s has done could not be undone", self.name)


def _taken_from(entries: list[E]) -> E | None:
    """Takes the only entry out, in one step; None: somebody has."""
    try:
        return entries.pop()
    except IndexError:
        return None


class Desk:
    """Where errands are handed in.

    An open one has threads that wait; one that takes an errand sees to it that another waits. One that is not
    open, or finds no thread, gives an errand a thread of its own.

    Attributes:
        is_forbidden: Whether the calling thread must not wait: it does its errand itself.
    """

    def __init__(self, name: str) -> None:
        self.is_forbidden: Callable[[], bool] = lambda: False
        self._name = name
        self._queue: SimpleQueue[Errand[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()  # for the threads of the desk
        self._threads: list[threading.Thread] = []
        self._waiting = 0
        self._is_open = False
        self._is_full = False  # all threads are busy, and none can be started

    def hand_in(self, errand: Errand[Any]) -> None:
        """Has a thread do it.

        Raises:
            OutOfMemoryError: There is none, and none can be started.
        """
        if errand.here or self.is_forbidden():
            errand.do(is_alone=True)
            return
        if self._serves():
            self._queue.put(errand)
        if not self._serves():  # also if that is so only by now; it is done once
            self._start(errand)

    def _serves(self) -> bool:
        return self._is_open and not self._is_full

    def _start(self, errand: Errand[Any]) -> None:
        handed_on = Latch()

        def start() -> None:
            try:
                errand.threads.append(threading.get_native_id())
                start_thread(lambda: self._serve_one(errand), self._name)
            except (OutOfMemoryError, MemoryError):
                self._do_without(errand)
            handed_on.open()

        # Not ``start`` itself: CPython 3.11 may keep a function that it had no memory to call.
        boot = functools.partial(start)
        starter = weakref.ref(boot)
        try:
            start_new_thread(boot, ())  # ``start_thread`` takes locks, which a caller must not
        except (RuntimeError, MemoryError) as exc:
            if not errand.or_here:
                raise no_thread(errand.name) from exc
            errand.do(is_alone=True)
            return
        del boot  # so that only that thread has it
        while not handed_on.wait(_STARTER_LOOK_S):
            if starter() is None and not handed_on.is_open:  # it had no memory for its first steps
                self._do_without(errand)
                return

    def _do_without(self, errand: Errand[Any]) -> None:
        """No thread can be had for it."""
        if errand.or_here:  # this thread is as good, but for its name
            errand.do(is_alone=True)
        else:
            errand.refuse(no_thread(errand.name))

    # ---- not for a caller's thread ---------------------------------------------------------------------------

    def open(self) -> None:
        """Starts its threads.

        Raises:
            OutOfMemoryError: They cannot be started.
        """
        self._is_open = True
        for _ in range(_WAITING):
            if not self._add_thread():
                raise no_thread("the calls of an engine")

    def close(self, timeout_s: float) -> None:
        """Ends its threads, those that have an errand when they have done it; waits for them at most so long."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_open = False
            threads = [t for t in self._threads if t is not threading.current_thread()]
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> bool:
        with self._lock, suppress(OutOfMemoryError, MemoryError):
            self._threads.append(start_thread(self._serve, self._name))
            return True
        return False

    def _serve_one(self, errand: Errand[Any]) -> None:
        errand.threads.append(threading.get_native_id())
        errand.do(is_alone=not self._is_open)

    def _serve(self) -> None:
        while (errand := self._next()) is not None:
            errand.do()
            errand = None  # one that waits must not keep what it was about
        with self._lock:
            self._threads.remove(threading.current_thread())

    def _next(self) -> Errand[Any] | None:
        with self._lock:
            if not self._is_open or self._waiting >= _WAITING:
                return None
            self._waiting += 1
            self._is_full = False
        errand = self._queue.get()
        with self._lock:
            self._waiting -= 1
            is_last = self._serves() and not self._waiting
        if is_last and not self._add_thread():
            self._is_full = True
            self._refuse_all()
        return errand

    def _refuse_all(self) -> None:
        """Nobody will look before this thread has done its errand."""
        with suppress(Empty):
            while True:
                errand = self._queue.get_nowait()
                if errand is not None:
                    errand.refuse(no_thread(errand.name))


def handed_in(method: Callable[P, Errand[T]]) -> Callable[P, T]:
    """Makes a public call of a method that gives an errand: does it, and returns or raises what comes out.

    The outermost frame of ours: an interrupt before its end has the errand undone, after it the caller has the result.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        errand = method(*args, **kwargs)
        try:
            try:
                result = errand.run()
                errand.kept = True  # nothing between this and the return looks for signals
                return result
            finally:
                # Nor does anything before this: whatever breaks the rest, its thread sees it. Python 3.10 looks for
                # signals before the first step of a handler, but not if that begins a ``try``.
                try:
                    errand.dropped = not errand.kept
                finally:
                    pass
        except BaseException:
            errand.settle()
            raise

    # What callers see is what it returns, not how.
    method.__annotations__["return"] = (
        method.__annotations__["return"].removeprefix("Errand[").removesuffix("]")
    )
    return call
