"""Latches and changes: nobody sleeps for ever, whoever was woken or interrupted meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from llm_datadist import _waiting
from llm_datadist._waiting import Changes, Latch, check_outside, guard, is_within
from llm_datadist.status import LinkBusyError
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.within import REFUSED, Owner, within
from tests.support.world import wait_until

PATIENCE_S = 10.0


def started(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_latch_lets_all_waiters_go_and_later_ones_at_once() -> None:
    latch, results = Latch(), list[bool]()
    threads = [started(lambda: results.append(latch.wait())) for _ in range(8)]
    assert wait_until(lambda: len(latch._waiting) == 8, PATIENCE_S)
    assert not latch.is_open
    latch.open()
    latch.open()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [True] * 8
    assert latch.wait() and latch.wait(0) and latch.is_open


def test_a_wait_ends_with_its_time() -> None:
    latch, watch = Latch(), Stopwatch()
    assert not latch.wait(0.05) and not latch.wait(0) and not latch.wait(-1)
    assert watch.elapsed >= 0.05 and watch.within(5)


def test_no_race_of_an_opening_with_a_wait_leaves_the_waiter() -> None:
    for _ in range(300):
        latch = Latch()
        barrier = threading.Barrier(2)

        def wait(latch: Latch = latch, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            latch.wait()

        thread = started(wait)
        barrier.wait()
        latch.open()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_waiter_that_has_gone_keeps_nobody_from_being_woken() -> None:
    latch = Latch()
    assert not latch.wait(0)  # its lock stays behind
    thread = started(latch.wait)
    assert wait_until(lambda: len(latch._waiting) == 2, PATIENCE_S)
    latch.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_change_wakes_all_that_wait_for_it() -> None:
    lock = threading.Lock()
    changes, seen, values = Changes(lock), list[int](), list[bool]()

    def wait() -> None:
        with lock:
            values.append(changes.wait_for(lambda: seen, PATIENCE_S))

    threads = [started(wait) for _ in range(4)]
    assert wait_until(lambda: len(changes._waiting) == 4, PATIENCE_S)
    with lock:
        seen.append(1)
    changes.notify_all()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert values == [True] * 4 and not changes._waiting and not lock.locked()


def test_a_change_that_nobody_was_told_of_is_seen_all_the_same() -> None:
    """The thread that was to tell may have been interrupted before."""
    lock = threading.Lock()
    changes, seen, values = Changes(lock), list[int](), list[bool]()

    def wait() -> None:
        with lock:
            values.append(changes.wait_for(lambda: seen, PATIENCE_S))

    thread = started(wait)
    assert wait_until(lambda: bool(changes._waiting), PATIENCE_S)
    seen.append(1)
    thread.join(PATIENCE_S / 2)
    assert values == [True]


def test_a_wait_for_a_change_ends_with_its_time_and_leaves_no_ticket() -> None:
    lock = threading.Lock()
    changes = Changes(lock)
    with lock:
        watch = Stopwatch()
        assert not changes.wait_for(lambda: False, 2.5 * _waiting._LONGEST_S)
        assert watch.elapsed >= 2.5 * _waiting._LONGEST_S
        assert changes.wait_for(lambda: True, 0)
    assert not changes._waiting


def test_a_ticket_is_for_the_next_change_after_it_was_taken() -> None:
    changes = Changes(threading.Lock())
    ticket = changes.ticket()
    changes.notify_all()
    watch = Stopwatch()
    ticket.sleep(PATIENCE_S)  # outside the lock: it is over already
    assert watch.within(_waiting._LONGEST_S / 2)


# ---- guards ------------------------------------------------------------------------------------------


def test_a_guard_is_known_by_the_thread_that_holds_it() -> None:
    seen = list[bool]()
    with within():
        assert is_within()
        started(lambda: seen.append(is_within())).join(PATIENCE_S)
        with pytest.raises(LinkBusyError, match=f"a pull was called {REFUSED}.*call it again when"):
            check_outside("a pull")
    assert seen == [False] and not is_within()
    check_outside("a pull")


def test_a_guard_goes_with_its_owner() -> None:
    owner = Owner()
    before = len(_waiting._guards)
    first, second = guard(owner), guard(owner)
    assert len(_waiting._guards) == before + 2
    with second:
        assert first.acquire(timeout=0)  # it is another one
        first.release()
    del owner
    assert len(_waiting._guards) == before


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="newer versions leave no lock of a ``with`` taken")
def test_g12_a_guard_that_no_call_holds_any_more_is_let_go() -> None:
    """Of two signals 3.10 runs the second before ``__exit__``."""
    owner = Owner()
    lock = guard(owner)
    lock.acquire()
    lock.acquire()
    assert not is_within()
    free = list[bool]()
    started(lambda: free.append(lock.acquire(timeout=PATIENCE_S))).join(PATIENCE_S)
    assert free == [True]
