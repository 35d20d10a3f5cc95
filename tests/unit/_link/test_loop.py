"""The control thread: order of timers and sockets, late wake-ups, exceptions, the end."""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from llm_datadist import OutOfMemoryError
from llm_datadist._link.loop import ERROR_PAUSE_S, LATE_S, MIN_PURGE, ControlLoop
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.shortage import Shortage
from tests.support.steps import Steps
from tests.support.world import wait_until


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    made = ControlLoop("test-loop")
    made.open()
    made.start()
    yield made
    made.stop(2)


def test_calls_run_in_order_on_the_thread(loop: ControlLoop) -> None:
    order: list[object] = []
    done = threading.Event()
    for number in range(50):
        loop.call_soon(lambda number=number: order.append(number))  # type: ignore[misc]
    loop.call_soon(lambda: order.append(loop.on_thread()))
    loop.call_soon(done.set)
    assert done.wait(5) and order == [*range(50), True]
    assert not loop.on_thread()


def test_timers_run_by_time_and_can_be_cancelled(loop: ControlLoop) -> None:
    order: list[str] = []
    done = threading.Event()
    now = time.monotonic()

    def set_up() -> None:  # on the thread, so that none runs before the cancel
        loop.call_at(now + 0.06, done.set)
        loop.call_at(now + 0.04, lambda: order.append("b"))
        loop.call_at(now + 0.02, lambda: order.append("a"))
        handle = loop.call_at(now + 0.03, lambda: order.append("never"))
        handle.cancel()
        handle.cancel()

    loop.call_soon(set_up)
    assert done.wait(5) and order == ["a", "b"]
    assert time.monotonic() - now >= 0.06


def test_what_had_arrived_is_handled_before_a_timer_that_came_late(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    with left, right:
        order: list[str] = []
        done = threading.Event()

        def read(events: int) -> None:
            left.recv(10)
            order.append("data")

        def held_up() -> None:
            loop.call_at(time.monotonic() + 0.05, lambda: order.append("judged"))
            loop.call_at(time.monotonic() + 0.06, done.set)
            threading.Event().wait(0.2)  # the timer is overdue; meanwhile the data arrives
            right.send(b"x")

        loop.call_soon(lambda: loop.register(left, selectors.EVENT_READ, read))
        loop.call_soon(held_up)
        assert done.wait(5) and order == ["data", "judged"]
        loop.call_soon(lambda: loop.unregister(left))


def test_a_timer_knows_by_when_everything_was_read(loop: ControlLoop) -> None:
    ages: list[float] = []
    done = threading.Event()

    def held_up() -> None:
        loop.call_at(time.monotonic(), lambda: ages.append(time.monotonic() - loop.polled_at))
        loop.call_soon(lambda: threading.Event().wait(0.2) and None)  # in the timer's own turn
        loop.call_at(time.monotonic() + 0.01, done.set)

    loop.call_soon(held_up)
    assert done.wait(5) and ages[0] >= 0.2


def test_a_late_turn_is_told(loop: ControlLoop) -> None:
    told: list[float] = []
    done = threading.Event()
    watch = Stopwatch()
    loop.on_late = told.append
    loop.call_soon(lambda: None)
    loop.call_at(time.monotonic() + 0.01, lambda: threading.Event().wait(0.5) and None)
    loop.call_at(time.monotonic() + 0.6, done.set)
    assert done.wait(5)
    late = sum(told)
    assert late >= 0.4 and watch.took(watch.began + late).within(1.0)
    assert len(told) == 1 or watch.took().stalled > LATE_S  # a busy machine makes other turns late as well


def test_an_idle_loop_is_never_late(loop: ControlLoop) -> None:
    told: list[float] = []
    loop.on_late = told.append
    done = threading.Event()
    watch = Stopwatch()
    done.wait(0.4)
    loop.call_soon(done.set)
    assert done.wait(5) and (told == [] or watch.took().stalled > LATE_S)


def test_an_exception_does_not_end_the_thread(loop: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    now = time.monotonic()
    left, right = socket.socketpair()
    with left, right:

        def fail(events: int = 0) -> None:
            loop.unregister(left)
            raise ZeroDivisionError

        right.send(b"x")
        loop.call_soon(lambda: loop.register(left, selectors.EVENT_READ, fail))
        loop.call_soon(fail)
        loop.call_at(now + 0.02, fail)
        loop.call_at(now + 0.04, done.set)
        assert done.wait(5)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) >= 2


def test_an_idle_loop_sleeps(loop: ControlLoop) -> None:
    turns: list[int] = []
    loop.before_wait = lambda: turns.append(1)
    threading.Event().wait(0.3)
    assert len(turns) <= 1


def test_cancelled_timers_do_not_pile_up(loop: ControlLoop) -> None:
    for _ in range(20 * MIN_PURGE):
        loop.call_at(time.monotonic() + 1000, lambda: None).cancel()
    assert len(loop._timers) <= 2 * MIN_PURGE


def test_stop_runs_what_was_queued_and_frees_the_descriptors() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    loop = ControlLoop("test-loop")
    loop.open()
    loop.start()
    ran: list[int] = []
    for number in range(10):
        assert loop.call_soon(lambda number=number: ran.append(number))  # type: ignore[misc]
    loop.stop(5)
    loop.stop(5)
    assert ran == [*range(10)]
    assert not loop.call_soon(lambda: None)
    loop.call_at(0, lambda: None)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_loop_that_was_never_started_frees_its_descriptors() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    loop = ControlLoop("test-loop")
    loop.stop(1)
    loop = ControlLoop("test-loop")
    loop.open()
    loop.stop(1)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_g14_a_socket_at_rest_wakes_nobody_until_its_time(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    with left, right:
        seen: list[float] = []
        twice = threading.Event()

        def read(events: int) -> None:
            seen.append(time.monotonic())
            if len(seen) == 2:
                left.recv(1)
                twice.set()
            else:
                loop.rest(left, 0.1)

        loop.call_soon(lambda: loop.register(left, selectors.EVENT_READ, read))
        right.send(b"x")
        assert twice.wait(5)
        assert seen[1] - seen[0] >= 0.1
        loop.call_soon(lambda: loop.unregister(left))


def test_g14_what_is_unregistered_at_rest_does_not_come_back(loop: ControlLoop) -> None:
    left, right = socket.socketpair()
    with left, right:
        seen: list[int] = []
        done = threading.Event()

        def register_and_end() -> None:
            loop.register(left, selectors.EVENT_READ, seen.append)
            loop.rest(left, 0.01)
            loop.rest(left, 0.01)
            loop.unregister(left)
            loop.rest(left, 0.01)
            loop.call_at(time.monotonic() + 0.05, close)

        def close() -> None:
            left.close()
            loop.rest(left, 0.01)
            loop.call_at(time.monotonic() + 0.05, done.set)

        right.send(b"x")
        loop.call_soon(register_and_end)
        assert done.wait(5) and seen == []


def test_g14_a_rest_is_longer_where_the_system_has_no_room(
    loop: ControlLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = socket.socketpair()
    with left, right:
        register, tries = selectors.EpollSelector.register, []
        heard = threading.Event()

        def refuse(*args: object) -> object:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(28, "No space left on device")
            return register(*args)  # type: ignore[arg-type]

        def hear(events: int) -> None:
            left.recv(1)
            heard.set()

        def begin() -> None:
            loop.register(left, selectors.EVENT_READ, hear)
            monkeypatch.setattr(selectors.EpollSelector, "register", refuse)
            loop.rest(left, 0.01)

        loop.call_soon(begin)
        right.send(b"x")
        assert heard.wait(5) and len(tries) == 3
        monkeypatch.undo()
        loop.call_soon(lambda: loop.unregister(left))


def test_g14_a_callback_that_fails_is_not_called_in_a_spin(
    loop: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = socket.socketpair()
    with left, right:
        calls: list[float] = []

        def fail(events: int) -> None:
            calls.append(time.monotonic())
            raise MemoryError

        loop.call_soon(lambda: loop.register(left, selectors.EVENT_READ, fail))
        right.send(b"x")
        assert wait_until(lambda: len(calls) >= 4)
        ended = threading.Event()
        loop.call_soon(lambda: loop.unregister(left))
        loop.call_soon(ended.set)
        assert ended.wait(5)
        assert all(later - call >= ERROR_PAUSE_S for call, later in itertools.pairwise(calls))


def test_g3_a_loop_whose_thread_cannot_be_started_can_be_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = ControlLoop("llm-test-loop")
    loop.open()
    with Shortage(1), pytest.raises(OutOfMemoryError, match="llm-test-loop"):
        loop.start()
    assert not loop.started and loop.is_open
    loop.start()
    done = threading.Event()
    loop.call_soon(done.set)
    assert done.wait(5)
    loop.stop(2)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_g14_a_loop_that_cannot_be_opened_holds_nothing(first: int) -> None:
    loop = ControlLoop("llm-test-loop")
    before = len(os.listdir("/proc/self/fd"))
    with Shortage(first), pytest.raises(OSError, match=r"Too many open files|No space left"):
        loop.open()
    assert len(os.listdir("/proc/self/fd")) == before
    loop.stop(1)


def test_g13_an_interrupted_call_leaves_a_thread_that_others_can_wake(loop: ControlLoop) -> None:
    for number in itertools.count(1):
        interrupted = Steps(number, files="loop.py").run(lambda: loop.call_soon(lambda: None))
        done = threading.Event()
        loop.call_soon(done.set)
        assert done.wait(2), number
        if not interrupted:
            break
    assert number > 3
