"""Background tasks: answers are final, waiting ends when it must, callbacks harm nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from llm_datadist.status import (
    LinkBusyError,
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    ParamInvalidError,
    TransferTimeoutError,
)
from llm_datadist.tasks import CacheTask, TaskBook
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.within import REFUSED, within

OK, FAILED, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT
LINK = LLMStatusCode.LLM_LINK_FAILED


def nothing() -> None:
    pass


@pytest.mark.rule("5.113", "5.114", "5.115")
def test_results_while_running_and_after() -> None:
    book = TaskBook(3, nothing)
    assert book.task.get_results(0) == [None, None, None]
    book.begin(1)
    book.finish(0, OK)
    assert book.task.get_results(0) == [OK, TIMEOUT, None]
    assert (book.is_finished(0), book.is_finished(1)) == (True, False)
    assert (book.task.done(), book.task.synchronize(0)) == (False, TIMEOUT)
    book.finish(1, OK)
    book.finish(2, OK)
    assert book.task.get_results() == [OK, OK, OK]
    assert (book.task.done(), book.task.synchronize(), book.task.exception()) == (True, OK, None)


@pytest.mark.rule("5.112")
def test_a2_first_failing_code_in_config_order_not_in_time() -> None:
    book = TaskBook(3, nothing)
    late, early = LinkFailedError("late"), ParamInvalidError("early")
    book.finish(2, early.status_code, early)
    book.finish(1, LINK, late)
    book.finish(0, OK)
    assert book.task.synchronize() == LINK
    assert book.task.exception() is late
    assert book.task.get_results() == [OK, LINK, LLMStatusCode.LLM_PARAM_INVALID]


def test_first_answer_is_final() -> None:
    book = TaskBook(1, nothing)
    book.finish(0, OK)
    book.finish(0, LINK, LinkFailedError("late"))
    book.begin(0)
    assert not book.task.cancel()
    assert (book.task.get_results(), book.task.exception()) == ([OK], None)


def test_a_code_without_error_still_has_an_exception() -> None:
    book = TaskBook(1, nothing)
    book.finish(0, LINK)
    error = book.task.exception()
    assert isinstance(error, LinkFailedError)
    assert "config 0" in str(error)


def test_exception_of_a_running_task() -> None:
    with pytest.raises(TransferTimeoutError, match="still runs after 0 ms"):
        TaskBook(1, nothing).task.exception(0)


def test_empty_task_is_done() -> None:
    task = TaskBook(0, nothing).task
    assert (task.done(), task.synchronize(), task.get_results()) == (True, OK, [])


@pytest.mark.parametrize(
    ("timeout", "error"), [(-1, ParamInvalidError), (2**31, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_timeouts(timeout: Any, error: type[Exception]) -> None:
    task = TaskBook(1, nothing).task
    for method in (task.synchronize, task.get_results, task.exception):
        with pytest.raises(error, match="timeout_in_millis"):
            method(timeout)


@pytest.mark.rule("5.113")
def test_wait_ends_at_its_timeout() -> None:
    task = TaskBook(1, nothing).task
    watch = Stopwatch()
    assert task.synchronize(60) == TIMEOUT
    assert watch.elapsed >= 0.06 and watch.within(5)


def test_every_waiter_wakes_at_the_last_answer() -> None:
    book = TaskBook(2, nothing)
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(book.task.synchronize) for _ in range(2)]
        results = pool.submit(book.task.get_results)
        book.finish(0, OK)
        assert not any(w.done() for w in waits)
        book.finish(1, LINK)
        assert [w.result(10) for w in waits] == [LINK, LINK]
        assert results.result(10) == [OK, LINK]


@pytest.mark.rule("5.115", "5.116")
def test_cancel_ends_what_is_unfinished() -> None:
    told: list[str] = []
    book = TaskBook(3, lambda: told.append("cancel"))
    book.task.add_done_callback(lambda task: told.append("done"))
    book.finish(1, OK)
    book.begin(0)
    assert book.task.cancel()
    assert told == ["cancel", "done"]
    assert book.task.get_results() == [FAILED, OK, FAILED]
    assert (book.task.done(), book.task.synchronize()) == (True, FAILED)
    assert isinstance(book.task.exception(), CancelledError)
    book.finish(0, OK)
    assert book.task.get_results() == [FAILED, OK, FAILED]
    assert not book.task.cancel()
    assert told == ["cancel", "done"]


def test_cancel_stops_the_work_before_it_answers() -> None:
    seen: list[bool] = []
    book = TaskBook(1, lambda: seen.append(book.task.done()))
    assert book.task.cancel()
    assert seen == [False]


def test_what_the_hook_answers_itself_stays() -> None:
    book = TaskBook(2, lambda: book.finish(0, OK))
    assert book.task.cancel()
    assert book.task.get_results() == [OK, FAILED]
    done = TaskBook(1, lambda: done.finish(0, OK))
    assert not done.task.cancel()  # it was faster
    assert (done.task.synchronize(), done.task.exception()) == (OK, None)


def test_a_second_cancel_meanwhile_asks_no_second_time() -> None:
    told: list[bool] = []
    book = TaskBook(1, lambda: told.append(book.task.cancel()))
    assert book.task.cancel()
    assert told == [True]


def test_cancel_hook_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    def hook() -> None:
        raise ValueError("hook")

    book = TaskBook(1, hook)
    done: list[CacheTask] = []
    book.task.add_done_callback(done.append)
    assert book.task.cancel()
    assert done == [book.task]
    assert "hook" in caplog.text


@pytest.mark.rule("5.117")
def test_callbacks_run_once_each_also_when_added_late() -> None:
    book = TaskBook(1, nothing)
    called: list[str] = []
    book.task.add_done_callback(lambda task: called.append("early"))
    assert called == []
    book.finish(0, OK)
    book.task.add_done_callback(lambda task: called.append("late" if task.done() else "too early"))
    assert called == ["early", "late"]
    with pytest.raises(TypeError, match="fn must be callable, not int"):
        book.task.add_done_callback(3)  # type: ignore[arg-type]


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no log")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError()])
def test_e3_callback_that_raises_and_a_log_that_raises(error: BaseException) -> None:
    def bad(_: CacheTask) -> None:
        raise error

    logger, handler = logging.getLogger("llm_datadist.tasks"), Raises()
    logger.addHandler(handler)
    try:
        book = TaskBook(1, nothing)
        called: list[CacheTask] = []
        book.task.add_done_callback(bad)
        book.task.add_done_callback(called.append)
        book.finish(0, OK)
        book.task.add_done_callback(bad)
    finally:
        logger.removeHandler(handler)
    assert (called, book.task.synchronize()) == ([book.task], OK)


def test_callback_may_use_its_task() -> None:
    book = TaskBook(1, nothing)
    seen: list[Any] = []
    book.task.add_done_callback(lambda task: seen.append((task.synchronize(), task.get_results())))
    book.finish(0, OK)
    assert seen == [(OK, [OK])]


@pytest.mark.rule("5.118")
def test_await_wakes_from_another_thread() -> None:
    async def main() -> LLMStatusCode:
        book = TaskBook(1, nothing)
        waiting = asyncio.ensure_future(asyncio.wait_for(wrap(book.task), 10))
        while not book.task._callbacks:  # until it really waits
            await asyncio.sleep(0)
        thread = threading.Thread(target=book.finish, args=(0, LINK))
        thread.start()
        watch = Stopwatch()
        code = await waiting
        assert watch.within(5), "the loop was not woken"
        thread.join()
        assert await book.task == LINK
        return code

    async def wrap(task: CacheTask) -> LLMStatusCode:
        return await task

    assert asyncio.run(main(), debug=True) == LINK  # debug: a call that is not thread-safe raises


def test_cancelled_await_leaves_the_task_alone() -> None:
    async def wrap(task: CacheTask) -> LLMStatusCode:
        return await task

    wrong: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
        book = TaskBook(1, nothing)
        waiting = asyncio.ensure_future(wrap(book.task))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not book.task.done()
        book.finish(0, OK)
        await asyncio.sleep(0)
        assert book.task.synchronize(0) == OK

    asyncio.run(main())
    assert wrong == []


def test_finish_after_the_loop_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    book = TaskBook(1, nothing)

    async def main() -> None:
        async def wrap() -> LLMStatusCode:
            return await book.task

        waiting = asyncio.ensure_future(wrap())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    book.finish(0, OK)
    assert book.task.synchronize(0) == OK
    assert caplog.records == []


def test_many_threads_give_each_config_one_answer() -> None:
    book = TaskBook(64, nothing)
    ends: list[CacheTask] = []
    book.task.add_done_callback(ends.append)
    codes = [OK, LINK, FAILED, TIMEOUT]

    def writer(code: LLMStatusCode) -> None:
        for i in range(64):
            book.begin(i)
            book.finish(i, code, LLMException("x", status_code=code))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writer, codes))
    assert len(ends) == 1
    assert all(code in codes for code in book.task.get_results(0))


def test_repr_says_how_far() -> None:
    book = TaskBook(2, nothing)
    book.finish(0, OK)
    assert repr(book.task) == "<CacheTask 1 of 2 unfinished>"
    book.finish(1, OK)
    assert repr(book.task) == "<CacheTask LLMStatusCode.LLM_SUCCESS>"


def test_g12_nobody_waits_for_a_task_for_whom_the_engine_waits() -> None:
    book = TaskBook(1, nothing)
    task = book.task
    with within():
        for wait in (task.synchronize, task.get_results, task.exception):
            with pytest.raises(LinkBusyError, match=f"waiting for a transfer was called {REFUSED}"):
                wait()
        assert task.synchronize(0) == TIMEOUT
        book.finish(0, OK)
        assert task.synchronize() == OK and task.get_results() == [OK]


def test_g12_no_lock_is_taken_where_a_caller_looks() -> None:
    """A signal handler may have interrupted a thread that holds it."""
    book = TaskBook(2, nothing)
    seen: list[str] = []
    with book.task._lock:
        book.task.add_done_callback(lambda task: seen.append("before"))
        assert book.task.get_results(0) == [None, None]
    book.finish(0, OK)
    book.finish(1, FAILED)
    with book.task._lock:
        book.task.add_done_callback(lambda task: seen.append("after"))
        assert book.task.synchronize() == FAILED and book.task.exception() is not None
    assert seen == ["before", "after"]
