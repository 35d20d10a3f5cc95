"""Flights: a cut before, while and after something can be cancelled; who waits is woken when one ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from llm_datadist._engine.flights import Flight, Flights
from llm_datadist._waiting import Changes
from llm_datadist.status import CacheNotExistError, LinkFailedError

LINK: Any = object()
GONE = CacheNotExistError("gone")
DOWN = LinkFailedError("down")


def test_a_cut_while_something_runs_cancels_it_with_the_reason() -> None:
    flight, reasons = Flight(LINK, (1,)), []
    with flight.cancelling(reasons.append):
        flight.check()
        flight.cut(GONE)
        assert reasons == ["gone"]
    with pytest.raises(CacheNotExistError) as caught:
        flight.check()
    assert caught.value is GONE


def test_a_cut_before_cancels_at_once() -> None:
    flight, reasons = Flight(LINK, (1,)), []
    flight.cut(GONE)
    with flight.cancelling(reasons.append):
        assert reasons == ["gone"]


def test_a_cut_after_cancels_nothing_but_is_remembered() -> None:
    flight, reasons = Flight(LINK, (1,)), []
    with flight.cancelling(reasons.append):
        pass
    flight.cut(GONE)
    assert reasons == []
    with pytest.raises(CacheNotExistError):
        flight.check()


def test_what_failed_inside_is_not_cancelled_either() -> None:
    flight, reasons = Flight(LINK, (1,)), []
    with pytest.raises(ValueError, match="x"), flight.cancelling(reasons.append):
        raise ValueError("x")
    flight.cut(GONE)
    assert reasons == []


def test_the_first_cut_decides() -> None:
    flight, reasons = Flight(LINK, (1,)), []
    flight.on_cut(reasons.append)
    flight.cut(GONE)
    flight.cut(DOWN)
    assert flight.error is GONE
    assert set(reasons) == {"gone"}


def test_a_cancel_may_use_the_flight_again() -> None:
    """The lock of a flight is not held while it is cancelled: touching it there must not block."""
    flight, reasons = Flight(LINK, (1,)), []

    def again(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 1:
            flight.cut(DOWN)
            flight.on_cut(reasons.append)

    flight.on_cut(again)
    thread = threading.Thread(target=flight.cut, args=(GONE,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert set(reasons) == {"gone"}


def test_every_race_of_a_cut_with_what_it_cancels_ends_in_a_cancel() -> None:
    for _ in range(300):
        flight, cancelled = Flight(LINK, ()), threading.Event()
        start = threading.Barrier(2)

        def cut(flight: Flight = flight, start: threading.Barrier = start) -> None:
            start.wait()
            flight.cut(GONE)

        thread = threading.Thread(target=cut)
        thread.start()
        start.wait()
        with flight.cancelling(lambda _, cancelled=cancelled: cancelled.set()):  # type: ignore[misc]
            assert cancelled.wait(10)
        thread.join()


@pytest.fixture
def flights() -> Flights:
    return Flights(Changes(threading.Lock()))


def begin(flights: Flights, *ids: int, link: Any = LINK, serving: bool = False) -> Flight:
    with flights._changes._lock:
        return flights.begin(Flight(link, ids, serving=serving))


def all_of(flights: Flights) -> set[Flight]:
    with flights._changes._lock:
        return set(flights.where(lambda _: True))


def test_cut_picks_and_leaves_the_rest(flights: Flights) -> None:
    first, second = begin(flights, 1, 2), begin(flights, 3)
    flights.cut(lambda f: 2 in f.cache_ids, GONE)
    assert (first.error, second.error) == (GONE, None)
    assert all_of(flights) == {first, second}, "one that writes stays until its last byte"
    with flights._changes._lock:
        assert flights.where(lambda f: 3 in f.cache_ids) == [second]


def test_one_that_only_serves_is_out_at_once(flights: Flights) -> None:
    serving, writing = begin(flights, 1, serving=True), begin(flights, 1)
    flights.cut(lambda f: 1 in f.cache_ids, GONE)
    assert all_of(flights) == {writing}
    assert serving.error is GONE
    flights.end(serving)
    flights.end(writing)
    flights.end(writing)
    assert all_of(flights) == set()


def test_cut_calls_cancel_without_the_lock(flights: Flights) -> None:
    flight = begin(flights, 1)
    flight.on_cut(lambda _: flights.end(flight))
    thread = threading.Thread(target=flights.cut, args=(lambda _: True, GONE), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert all_of(flights) == set()


@pytest.mark.parametrize("serving", [False, True])
def test_the_end_wakes_who_waits(flights: Flights, serving: bool) -> None:
    flight = begin(flights, 1, serving=serving)
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        with flights._changes._lock:
            waiting.set()
            if flights._changes.wait_for(lambda: not flights.where(lambda _: True), 10):
                ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(10)
    with flights._changes._lock:
        pass  # the waiter has given the lock up: it waits
    if serving:
        flights.cut(lambda _: True, GONE)
    else:
        flights.end(flight)
    assert ended.wait(5)
    thread.join()
