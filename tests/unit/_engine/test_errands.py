"""Errands: done once, cut and undone for a caller who has gone, refused where there is no thread."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist._engine import errands as module
from llm_datadist._engine.errands import Call, Desk, Errand, handed_in
from llm_datadist._waiting import Latch
from llm_datadist.status import LinkBusyError, LinkFailedError, OutOfMemoryError
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.within import REFUSED, within
from tests.support.world import wait_until

PATIENCE_S = 10.0


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk("test-desk")
    desk.open()
    yield desk
    desk.close(PATIENCE_S)
    assert not running()


def running() -> int:
    return sum(t.name == "test-desk" for t in threading.enumerate())


def done(desk: Desk, job: Callable[[Call], Any]) -> Any:
    @handed_in
    def call() -> Errand[Any]:
        return Errand("call", desk, job)

    return call()


def test_a_result_comes_back_and_so_does_an_error(desk: Desk) -> None:
    assert done(desk, lambda call: threading.current_thread().name) == "test-desk"
    error = LinkFailedError("down")

    def fail(call: Call) -> None:
        raise error

    with pytest.raises(LinkFailedError) as caught:
        done(desk, fail)
    assert caught.value is error


def test_many_block_at_once_and_the_threads_that_are_not_needed_end(desk: Desk) -> None:
    latch, results = Latch(), list[bool]()
    callers = [
        threading.Thread(target=lambda: results.append(done(desk, lambda call: latch.wait(PATIENCE_S))))
        for _ in range(12)
    ]
    for caller in callers:
        caller.start()
    assert wait_until(lambda: running() >= 12, PATIENCE_S)
    latch.open()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert results == [True] * 12
    assert wait_until(lambda: running() == module._WAITING, PATIENCE_S)


def test_calls_one_after_the_other_need_no_further_thread(desk: Desk) -> None:
    for _ in range(50):
        done(desk, lambda call: call.on_drop(lambda: None))
    assert wait_until(lambda: running() == module._WAITING, PATIENCE_S)


def test_a_desk_that_is_not_open_lends_a_thread_that_has_ended_with_the_call() -> None:
    desk = Desk("test-desk")
    before = threading.active_count()
    for _ in range(20):
        assert done(desk, lambda call: threading.current_thread().name) == "test-desk"
        assert threading.active_count() == before


def test_where_the_caller_must_not_wait_it_does_it_itself(desk: Desk) -> None:
    desk.is_forbidden = lambda: True
    undone: list[int] = []

    def job(call: Call) -> int:
        call.on_drop(lambda: undone.append(1))
        return threading.get_ident()

    assert done(desk, job) == threading.get_ident()
    assert not undone


# ---- a caller who goes ------------------------------------------------------------------------------------


class Interrupted:
    """Waits of an errand's caller that are interrupted once the job is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, under_way: Latch) -> None:
        self._wait = Latch.wait
        self._under_way = under_way
        self.left = 1
        monkeypatch.setattr(Latch, "wait", lambda latch, timeout_s=None: self.wait(latch, timeout_s))

    def wait(self, latch: Latch, timeout_s: float | None) -> bool:
        if self.left and threading.current_thread() is threading.main_thread():
            self.left -= 1
            assert self._wait(self._under_way, PATIENCE_S)
            raise KeyboardInterrupt
        return self._wait(latch, timeout_s)


def test_an_interrupt_cuts_waits_and_has_it_undone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, cut, order = Latch(), Latch(), list[str]()

    def job(call: Call) -> str:
        call.on_cut(cut.open)
        under_way.open()
        assert cut.wait(PATIENCE_S) and call.dropped
        call.on_drop(lambda: order.append("undone"))
        order.append("done")
        return "result"

    Interrupted(monkeypatch, under_way)
    with pytest.raises(KeyboardInterrupt):
        done(desk, job)
    assert order == ["done", "undone"]


def test_what_begins_to_wait_after_the_cut_is_cut_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, cut = Latch(), Latch()

    def job(call: Call) -> None:
        under_way.open()
        assert wait_until(lambda: call.dropped, PATIENCE_S)
        call.on_cut(cut.open)
        assert cut.is_open

    Interrupted(monkeypatch, under_way)
    with pytest.raises(KeyboardInterrupt):
        done(desk, job)
    assert cut.is_open


def test_an_errand_that_was_done_is_not_refused_as_well(desk: Desk) -> None:
    """Its starter may see late that no thread can be had, after one of the desk had it."""
    errand: Errand[int] = Errand("call", desk, lambda call: 7)
    errand.do(is_alone=True)
    errand.refuse(OutOfMemoryError("no thread"))
    assert errand.run() == 7


def test_further_interrupts_of_the_clean_up_end_in_the_same_state(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, go_on, undone = Latch(), Latch(), Latch()

    def job(call: Call) -> None:
        call.on_drop(undone.open)
        under_way.open()
        assert go_on.wait(PATIENCE_S)

    Interrupted(monkeypatch, under_way).left = 2
    with pytest.raises(KeyboardInterrupt):
        done(desk, job)
    assert not undone.is_open
    go_on.open()
    assert undone.wait(PATIENCE_S), "nobody undid what the second interrupt did not wait for"


def test_what_failed_halfway_is_undone_before_its_caller_hears_of_it(desk: Desk) -> None:
    undone = Latch()

    def job(call: Call) -> None:
        call.on_drop(undone.open)
        raise LinkFailedError("x")

    with pytest.raises(LinkFailedError):
        done(desk, job)
    assert undone.is_open


def test_a_job_that_nobody_has_begun_never_is(desk: Desk) -> None:
    ran: list[int] = []
    errand: Errand[None] = Errand("call", desk, lambda call: ran.append(1))
    errand.settle()
    desk.hand_in(errand)
    done(desk, lambda call: None)
    done(desk, lambda call: None)
    assert not ran


def test_an_errand_that_is_handed_in_twice_is_done_once(desk: Desk) -> None:
    ran: list[int] = []
    errand: Errand[None] = Errand("call", desk, lambda call: ran.append(1))
    for _ in range(5):
        desk.hand_in(errand)
    assert errand._ended.wait(PATIENCE_S)
    for _ in range(3):
        done(desk, lambda call: None)
    assert ran == [1]


def test_a_result_that_was_dropped_after_it_was_kept_is_undone(desk: Desk) -> None:
    undone = Latch()
    errand: Errand[None] = Errand("call", desk, lambda call: call.on_drop(undone.open))
    errand.run()
    errand.kept = True
    assert errand._ended.wait(PATIENCE_S) and not undone.is_open
    errand.settle()
    assert undone.is_open


def test_a_caller_with_a_limit_does_not_wait_longer(desk: Desk) -> None:
    latch, late = Latch(), LinkFailedError("late")

    @handed_in
    def call() -> Errand[bool]:
        return Errand("call", desk, lambda call: latch.wait(PATIENCE_S), (0.05, late))

    watch = Stopwatch()
    with pytest.raises(LinkFailedError) as caught:
        call()
    assert caught.value is late and watch.within(5)
    latch.open()


# ---- no threads -------------------------------------------------------------------------------------------


def no_threads(monkeypatch: pytest.MonkeyPatch, *, nor_the_first: bool) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    if nor_the_first:
        monkeypatch.setattr(module, "start_new_thread", refuse)


@pytest.mark.parametrize("nor_the_first", [True, False])
def test_g3_without_a_thread_a_call_is_out_of_memory_and_nothing_was_done(
    nor_the_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ran = Desk("test-desk"), list[int]()
    with monkeypatch.context() as short:
        no_threads(short, nor_the_first=nor_the_first)
        with pytest.raises(OutOfMemoryError, match=r"call.*limit of threads or processes"):
            done(desk, lambda call: ran.append(1))
        with pytest.raises(OutOfMemoryError):
            desk.open()
        desk.close(PATIENCE_S)
    assert not ran
    assert done(desk, lambda call: 5) == 5


@pytest.mark.parametrize("nor_the_first", [True, False])
def test_g3_what_must_be_done_is_done_without_a_thread(
    nor_the_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @handed_in
    def call() -> Errand[int]:
        return Errand("call", Desk("test-desk"), lambda call: 5, or_here=True)

    no_threads(monkeypatch, nor_the_first=nor_the_first)
    assert call() == 5


def dies_at_once(step: Callable[[], object], _: tuple[()]) -> int:
    """A thread that has no memory for its first steps."""
    del step
    return start_new_thread(lambda: None, ())


def test_g3_without_memory_for_a_thread_a_call_is_out_of_memory_and_nothing_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, ran = Desk("test-desk"), list[int]()
    with monkeypatch.context() as short:
        short.setattr(module, "start_new_thread", dies_at_once)
        with pytest.raises(OutOfMemoryError, match="call"):
            done(desk, lambda call: ran.append(1))
    assert not ran
    assert done(desk, lambda call: 5) == 5


def test_g3_what_must_be_done_is_done_without_memory_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    @handed_in
    def call() -> Errand[int]:
        return Errand("call", Desk("test-desk"), lambda call: 5, or_here=True)

    monkeypatch.setattr(module, "start_new_thread", dies_at_once)
    assert call() == 5


@pytest.mark.parametrize("error", [OutOfMemoryError("none"), MemoryError()])
def test_g3_an_open_desk_outlives_a_thread_that_could_not_be_added(
    error: Exception, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    latch, begun = Latch(), list[int]()

    def block(call: Call) -> bool:
        begun.append(1)
        return latch.wait(PATIENCE_S)

    assert wait_until(lambda: desk._waiting == module._WAITING, PATIENCE_S)
    blocked = [errand_that(desk, block) for _ in range(module._WAITING - 1)]
    assert wait_until(lambda: len(begun) == len(blocked) and desk._waiting == 1, PATIENCE_S)
    with monkeypatch.context() as short:
        short.setattr(module, "start_thread", refuse)
        assert done(desk, lambda call: 4) == 4  # by the last one that waited
    latch.open()
    assert all(errand._ended.wait(PATIENCE_S) for errand in blocked)
    assert wait_until(desk._serves, PATIENCE_S)
    assert done(desk, lambda call: 5) == 5


def test_g3_an_open_desk_works_with_the_threads_that_it_has(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch, begun = Latch(), list[int]()

    def block(call: Call) -> bool:
        begun.append(1)
        return latch.wait(PATIENCE_S)

    for count in range(1, module._WAITING + 1):
        errand_that(desk, block)
        assert wait_until(lambda: len(begun) == count and desk._waiting > 0, PATIENCE_S)  # noqa: B023
    with monkeypatch.context() as short:
        no_threads(short, nor_the_first=True)
        last = errand_that(desk, block)  # by the last one that waited: nobody follows it
        assert wait_until(lambda: len(begun) == module._WAITING + 1, PATIENCE_S)
        with pytest.raises(OutOfMemoryError):
            done(desk, lambda call: None)
        latch.open()
        assert last._ended.wait(PATIENCE_S)
        assert wait_until(desk._serves, PATIENCE_S)
        assert done(desk, lambda call: 5) == 5


def errand_that(desk: Desk, job: Callable[[Call], Any]) -> Errand[Any]:
    errand: Errand[Any] = Errand("call", desk, job)
    desk.hand_in(errand)
    return errand


def test_close_ends_the_threads_and_later_calls_get_their_own() -> None:
    desk = Desk("test-desk")
    desk.open()
    desk.close(PATIENCE_S)
    assert not running()
    assert done(desk, lambda call: 5) == 5


def test_close_on_one_of_its_threads_does_not_wait_for_that(desk: Desk) -> None:
    watch = Stopwatch()
    done(desk, lambda call: desk.close(PATIENCE_S))
    assert watch.within(PATIENCE_S / 2)


def test_g12_nobody_waits_for_an_errand_for_whom_its_thread_waits(desk: Desk) -> None:
    begun: list[int] = []
    with within(), pytest.raises(LinkBusyError, match=f"call was called {REFUSED}.*nothing was done"):
        done(desk, lambda call: begun.append(1))
    done(desk, lambda call: None)
    assert not begun


def test_g12_what_has_a_limit_goes_on_when_its_caller_may_not_wait(desk: Desk) -> None:
    begun: list[int] = []

    @handed_in
    def call() -> Errand[Any]:
        return Errand("end", desk, lambda call: begun.append(1), (PATIENCE_S, LinkFailedError("late")))

    watch = Stopwatch()
    with within(), pytest.raises(LinkBusyError, match=f"end was called {REFUSED}.*goes on when"):
        call()
    assert watch.within(PATIENCE_S / 2)
    assert wait_until(lambda: begun == [1], PATIENCE_S)
