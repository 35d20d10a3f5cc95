"""The worker pool: every job once, keys do not hold each other up, threads come and go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from llm_datadist._engine import workers as module
from llm_datadist._engine.workers import Workers
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.world import wait_until

PATIENCE_S = 10.0


def never(seconds: float, fn: Callable[[], None]) -> None:
    raise AssertionError("a thread could not be started")


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers("test-worker", never, per_key=2)
    yield pool
    pool.close(PATIENCE_S)
    assert not running()


def running() -> int:
    return sum(t.name == "test-worker" for t in threading.enumerate())


class Gate:
    """Jobs that say that they have begun and stay until they are let go."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._begun: list[object] = []
        self._open = False

    def job(self, name: object) -> Callable[[], None]:
        def run() -> None:
            with self._condition:
                self._begun.append(name)
                self._condition.notify_all()
                assert self._condition.wait_for(lambda: self._open, PATIENCE_S)

        return run

    def begun(self, count: int) -> list[object]:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self._begun) >= count, PATIENCE_S), self._begun
            return list(self._begun)

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._condition.notify_all()


def flush(workers: Workers, key: object) -> None:
    """Returns when a job of this key has run."""
    done = threading.Event()
    workers.submit(key, done.set)
    assert done.wait(PATIENCE_S)


def test_at_most_so_many_of_one_key_and_another_key_does_not_wait(workers: Workers) -> None:
    gate = Gate()
    for n in range(5):
        workers.submit("slow", gate.job(n))
    assert gate.begun(2) == [0, 1]
    for _ in range(20):
        flush(workers, "other")
    assert gate.begun(2) == [0, 1]
    gate.open()
    assert gate.begun(5) == [0, 1, 2, 3, 4]


def test_many_keys_run_at_once(workers: Workers) -> None:
    gate = Gate()
    for n in range(12):
        workers.submit(n, gate.job(n))
    assert set(gate.begun(12)) == set(range(12))
    gate.open()


def test_jobs_of_one_key_start_in_order() -> None:
    pool = Workers("test-worker", never, per_key=1)
    order: list[int] = []
    for n in range(300):
        pool.submit("key", lambda n=n: order.append(n))  # type: ignore[misc]
    flush(pool, "key")
    assert order == list(range(300))
    pool.close(PATIENCE_S)


def test_every_job_of_many_submitters_runs_exactly_once(workers: Workers) -> None:
    ran: list[tuple[int, int]] = []

    def submit(who: int) -> None:
        for n in range(200):
            workers.submit(n % 7, lambda n=n: ran.append((who, n)))  # type: ignore[misc]

    threads = [threading.Thread(target=submit, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wait_until(lambda: len(ran) >= 800, PATIENCE_S)
    assert sorted(ran) == sorted((who, n) for who in range(4) for n in range(200))


def test_a_job_may_submit_more(workers: Workers) -> None:
    done = threading.Event()
    workers.submit("a", lambda: workers.submit("a", lambda: workers.submit("b", done.set)))
    assert done.wait(PATIENCE_S)


def test_an_idle_thread_takes_the_next_job(workers: Workers) -> None:
    for _ in range(50):
        flush(workers, "key")
        assert wait_until(lambda: workers._idle >= 1, PATIENCE_S)
    assert running() == 1


def test_two_jobs_at_once_do_not_count_on_the_same_idle_thread(workers: Workers) -> None:
    flush(workers, "key")
    assert wait_until(lambda: workers._idle == 1, PATIENCE_S)
    gate = Gate()
    with workers._condition:  # the idle thread cannot wake in between
        workers.submit("a", gate.job("a"))
        workers.submit("b", gate.job("b"))
    assert set(gate.begun(2)) == {"a", "b"}
    assert running() == 2
    gate.open()


def test_threads_end_when_idle_and_come_again(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.02)
    for _ in range(3):
        flush(workers, "key")
        assert wait_until(lambda: running() == 0, PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_job_that_raises_is_logged_and_frees_its_turn(
    workers: Workers, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("x")

    for _ in range(6):
        workers.submit("key", fail)
    flush(workers, "key")
    flush(workers, "key")
    assert wait_until(lambda: len(caplog.records) == 6, PATIENCE_S)
    assert {r.levelno for r in caplog.records} == {logging.ERROR}


def test_close_drops_what_has_not_begun_and_waits_for_what_runs() -> None:
    pool, gate, ran = Workers("test-worker", never, per_key=1), Gate(), threading.Event()
    pool.submit("key", gate.job(0))
    gate.begun(1)
    pool.submit("key", ran.set)
    closer = threading.Thread(target=pool.close, args=(PATIENCE_S,))
    closer.start()
    assert wait_until(lambda: pool._closed, PATIENCE_S)
    assert closer.is_alive()
    pool.submit("other", ran.set)
    gate.open()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert running() == 0
    assert not ran.is_set()


def test_close_gives_up_after_its_time_and_wakes_the_idle() -> None:
    pool, gate = Workers("test-worker", never, per_key=1), Gate()
    flush(pool, "idle")
    pool.submit("key", gate.job(0))
    gate.begun(1)
    watch = Stopwatch()
    pool.close(0.2)
    assert watch.elapsed >= 0.1 and watch.within(5)
    gate.open()
    assert wait_until(lambda: running() == 0, PATIENCE_S)


def test_close_from_a_job_does_not_wait_for_itself() -> None:
    pool, done = Workers("test-worker", never), threading.Event()

    def close() -> None:
        pool.close(PATIENCE_S)
        done.set()

    pool.submit("key", close)
    assert done.wait(PATIENCE_S / 2)
    assert wait_until(lambda: running() == 0, PATIENCE_S)


# ---- no threads ---------------------------------------------------------------------------------------------


class Later:
    """What is to be tried again, and is when a test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, seconds: float, fn: Callable[[], None]) -> None:
        self.calls.append(fn)


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_g3_a_job_that_can_be_refused_is_and_frees_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    later, errors = Later(), list[LLMException]()
    pool = Workers("test-worker", later, per_key=1)
    with monkeypatch.context() as short:
        no_threads(short)
        for _ in range(3):
            pool.submit("key", pytest.fail, errors.append)
    assert [e.status_code for e in errors] == [LLMStatusCode.LLM_OUT_OF_MEMORY] * 3
    assert "limit of threads or processes" in str(errors[0])
    flush(pool, "key")
    pool.close(PATIENCE_S)


def test_g3_a_job_that_cannot_be_refused_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later, ran = Later(), list[int]()
    pool = Workers("test-worker", later)
    with monkeypatch.context() as short:
        no_threads(short)
        for n in range(3):
            assert pool.submit(n, lambda n=n: ran.append(n))  # type: ignore[misc]
        assert len(later.calls) == 1 and len(caplog.records) == 1
        later.calls.pop()()
        assert len(later.calls) == 1 and not ran
    later.calls.pop()()
    assert wait_until(lambda: sorted(ran) == [0, 1, 2], PATIENCE_S)
    pool.close(PATIENCE_S)


def test_g3_a_job_without_a_thread_is_done_by_one_that_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    later, gate, done = Later(), Gate(), threading.Event()
    pool = Workers("test-worker", later)
    pool.submit("busy", gate.job(0))
    gate.begun(1)
    with monkeypatch.context() as short:
        no_threads(short)
        pool.submit("next", done.set)
        gate.open()
        assert done.wait(PATIENCE_S)
    pool.close(PATIENCE_S)
