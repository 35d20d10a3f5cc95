"""A background transfer: the side that callers read, and the side that the engine writes.

Invariants: the first answer of a config is final; the task is done exactly when every config has one.
Threads: every method from any thread; what callers' threads do takes no lock. Callbacks, and the engine's cancel
hook, run outside the lock in the thread that gave the last answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from threading import Lock
from typing import Any

from llm_datadist._logs import get_logger
from llm_datadist._waiting import Latch, check_outside
from llm_datadist.checks import check_int32
from llm_datadist.status import LLMStatusCode, ParamInvalidError, TransferTimeoutError, error_of

_log = get_logger("llm_datadist.tasks")


class Fate:
    """What came of a task, for whoever watches it go; it outlives the task.

    Attributes:
        asked: The caller has asked for the outcome, or cancelled.
        error: What it failed with; None: it has not failed.
    """

    __slots__ = ("asked", "error")

    def __init__(self) -> None:
        self.asked = False
        self.error: BaseException | None = None


class CacheTask:
    """A transfer that goes on in the background: one answer per config, in their order."""

    def __init__(
        self,
        count: int,
        on_cancel: Callable[[], None],
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._runner = run or _at_once
        self._elsewhere: Callable[[Callable[[], bool]], bool] = _here
        self._lock = Lock()
        self._ended = Latch()
        if not count:
            self._ended.open()
        self._codes: list[LLMStatusCode | None] = [None] * count
        self._errors: list[BaseException | None] = [None] * count
        self._begun = [False] * count
        self._left = count
        self._cancelled = False
        self._on_cancel = on_cancel
        self._callbacks: deque[Callable[[CacheTask], object]] = deque()
        self._fate = Fate()
        self._on_failure: Callable[[], None] = _nothing

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Waits for the end.

        Args:
            timeout_in_millis: How long to wait at most, int32 and not negative; None: as long as it takes.

        Returns:
            The first code, in the order of the configs, that is not success; LLM_SUCCESS when there is
            none; LLM_TIMEOUT while the task still runs.

        Raises:
            LinkBusyError: Called in a signal handler for which the engine waits.
        """
        if not self._wait(timeout_in_millis):
            return LLMStatusCode.LLM_TIMEOUT
        return self._ask()[0]

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Waits like :meth:`synchronize`.

        Returns:
            One code per config. Of those not finished yet, None is one of which nothing was sent,
            LLM_TIMEOUT one that was begun.
        """
        if self._wait(timeout_in_millis):
            self._fate.asked = True
        return [
            LLMStatusCode.LLM_TIMEOUT if code is None and begun else code
            for code, begun in zip(list(self._codes), self._begun, strict=True)
        ]

    def exception(self, timeout_in_millis: int | None = None) -> BaseException | None:
        """Waits like :meth:`synchronize`.

        Returns:
            The error behind the code that ``synchronize`` returns, None after success; a
            ``concurrent.futures.CancelledError`` when ``cancel`` ended something.

        Raises:
            TransferTimeoutError: The task still runs.
        """
        if not self._wait(timeout_in_millis):
            raise TransferTimeoutError(
                f"the transfer still runs after {timeout_in_millis} ms; wait again or cancel it"
            )
        return self._ask()[1]

    def done(self) -> bool:
        """Whether every config has its answer."""
        return self._left == 0

    def cancel(self) -> bool:
        """Ends what is not finished with LLM_FAILED.

        Returns:
            Whether there was anything to end.
        """
        return bool(self._left) and self._elsewhere(self._cancel)

    def _cancel(self) -> bool:
        with self._lock:
            if self._left == 0:
                return False
            if self._cancelled:
                return True  # the cancel that is under way gives the answers
            self._cancelled = self._fate.asked = True
            unfinished = [i for i, code in enumerate(self._codes) if code is None]
        _call(self._on_cancel)  # before the answers: what has its answer writes nothing any more
        with self._lock:
            for i in unfinished:
                if self._codes[i] is None:
                    self._codes[i] = LLMStatusCode.LLM_FAILED
            callbacks = self._end() if self._left else []
        self._run(callbacks)
        return any(self._codes[i] == LLMStatusCode.LLM_FAILED for i in unfinished)

    def add_done_callback(self, fn: Callable[[CacheTask], object]) -> None:
        """Calls ``fn(task)`` once when the task is done; at once if it is. What ``fn`` raises is logged."""
        if not callable(fn):
            raise TypeError(f"fn must be callable, not {type(fn).__name__}")
        # Noted, then it is looked at; ``_end`` does both the other way round, so that one of the two sees the other.
        self._callbacks.append(fn)
        if not self._left:
            self._run(self._take_callbacks())

    def __await__(self) -> Generator[Any, None, LLMStatusCode]:
        """``await task`` gives what ``synchronize()`` returns; cancelling the wait leaves the task alone."""
        import asyncio

        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():  # the wait may have been cancelled
                woken.set_result(None)

        def wake_from_thread(_: CacheTask) -> None:
            with suppress(RuntimeError):  # the loop may be closed by then
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(wake_from_thread)
        yield from woken
        return self._ask()[0]

    def __repr__(self) -> str:
        state = f"{self._left} of {len(self._codes)} unfinished" if self._left else str(self._outcome()[0])
        return f"<CacheTask {state}>"

    def _wait(self, timeout_in_millis: int | None) -> bool:
        seconds: float | None = None
        if timeout_in_millis is not None:
            seconds = check_int32("timeout_in_millis", timeout_in_millis) / 1000
            if seconds < 0:
                raise ParamInvalidError(f"timeout_in_millis is {timeout_in_millis}; it must not be negative")
        if not self._ended.is_open and seconds != 0:
            check_outside("waiting for a transfer")
        return self._ended.wait(seconds)

    def _ask(self) -> tuple[LLMStatusCode, BaseException | None]:
        """The outcome, for the caller."""
        self._fate.asked = True
        return self._outcome()

    def _outcome(self) -> tuple[LLMStatusCode, BaseException | None]:
        """Code and error of a task that is done: they stay."""
        for i, code in enumerate(self._codes):
            if code is not None and code != LLMStatusCode.LLM_SUCCESS:
                if self._cancelled:
                    error = CancelledError("cancelled by the caller")
                    error.__cause__ = self._errors[i]
                    return code, error
                return code, self._errors[i] or error_of(code, f"transfer config {i} ended with {code}")
        return LLMStatusCode.LLM_SUCCESS, None

    def _begin(self, i: int) -> None:
        with self._lock:
            self._begun[i] = True

    def _finish(self, i: int, code: LLMStatusCode, error: BaseException | None) -> None:
        with self._lock:
            if self._codes[i] is not None:
                return
            self._codes[i] = code
            self._errors[i] = error
            if self._left > 1:
                self._left -= 1
                return
            callbacks = self._end()
        if callbacks:
            self._runner(lambda: self._run(callbacks))
        self._fate.error = self._outcome()[1]
        if self._fate.error is not None:
            self._on_failure()

    def _end(self) -> list[Callable[[CacheTask], object]]:
        """Marks the task done (under the lock); returns the callbacks to run outside it."""
        self._left = 0
        callbacks = self._take_callbacks()
        self._ended.open()
        return callbacks

    def _take_callbacks(self) -> list[Callable[[CacheTask], object]]:
        taken: list[Callable[[CacheTask], object]] = []
        with suppress(IndexError):  # another thread has taken the last one
            while self._callbacks:
                taken.append(self._callbacks.popleft())
        return taken

    def _run(self, callbacks: list[Callable[[CacheTask], object]]) -> None:
        for fn in callbacks:
            _call(fn, self)


class TaskBook:
    """The engine's side of a :class:`CacheTask`.

    Args:
        count: Number of configs; 0 makes a task that is done.
        on_cancel: Called once, before ``cancel`` gives the answers that are still missing: it stops the work,
            and may answer itself. It must not block for long.
        run: Runs a job that calls the user's callbacks, when ``finish`` may be called where they must not run;
            None: at once, there.
        elsewhere: Runs ``cancel`` on a thread that no signal strikes, and waits for it; None: in the caller's.
    """

    def __init__(
        self,
        count: int,
        on_cancel: Callable[[], None],
        run: Callable[[Callable[[], None]], None] | None = None,
        elsewhere: Callable[[Callable[[], bool]], bool] | None = None,
    ) -> None:
        self._task: CacheTask | None = CacheTask(count, on_cancel, run)
        self._watched = False
        if elsewhere is not None:
            self._task._elsewhere = elsewhere

    @property
    def task(self) -> CacheTask:
        """What the caller holds.

        Raises:
            LookupError: It is done, and the caller's alone.
        """
        if self._task is None:
            raise LookupError("this task is done, and its caller's alone")
        return self._task

    def begin(self, i: int) -> None:
        """The first bytes for config ``i`` are about to be sent."""
        if self._task is not None:
            self._task._begin(i)

    def finish(self, i: int, code: LLMStatusCode, error: BaseException | None = None) -> None:
        """Answers config ``i``; the first answer stays."""
        task = self._task
        if task is None:
            return
        task._finish(i, code, error)
        if self._watched and task.done():
            self._task = None  # errors lead to frames, and those back to here

    def is_finished(self, i: int) -> bool:
        """Whether config ``i`` has its answer."""
        return self._task is None or self._task._codes[i] is not None

    def watch(self, on_failure: Callable[[], None]) -> Fate:
        """The task is its caller's alone when it is done; ``finish`` calls ``on_failure`` when it has failed."""
        task = self.task
        self._watched = True
        task._on_failure = on_failure
        return task._fate


def _nothing() -> None:
    return None


def _at_once(job: Callable[[], None]) -> None:
    job()


def _here(job: Callable[[], bool]) -> bool:
    return job()


def _call(fn: Callable[..., object], *args: object) -> None:
    """Runs code of others: what it raises, and what logging that raises, stays here."""
    try:
        fn(*args)
    except KeyboardInterrupt:
        raise
    except BaseException:
        with suppress(Exception):
            _log.exception("a callback of a transfer raised")
