"""How an engine finds out that its threads wait for the GIL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist.transports import _libc
from llm_datadist.transports._waits import LOOK_S, REMEMBERED_S, TELLING_S, Waits
from tests.support.world import wait_until

LONG_S = 0.005  # the interpreter's switch interval


@pytest.fixture
def waits() -> Waits:
    return Waits()


def test_a_call_that_waited_is_remembered_for_a_while(waits: Waits) -> None:
    assert not waits.held_up(10.0)
    waits.note(10.0, LONG_S, 0.0, gave_way=True)
    assert waits.held_up(10.0) and waits.held_up(10.0 + REMEMBERED_S / 2)
    assert not waits.held_up(10.0 + REMEMBERED_S)


def test_a_thread_that_was_not_run_has_not_waited(waits: Waits) -> None:
    waits.note(10.0, LONG_S, TELLING_S, gave_way=False)
    assert not waits.held_up(10.0)
    waits.note(10.0, LONG_S, TELLING_S, gave_way=True)
    waits.note(10.0, LONG_S, TELLING_S, gave_way=False)
    assert waits.held_up(10.0), "and has shown nothing else either"


def test_a_call_that_was_long_enough_and_did_not_wait_ends_it(waits: Waits) -> None:
    waits.note(10.0, LONG_S, 0.0, gave_way=True)
    waits.note(10.0, 0.0, TELLING_S / 2, gave_way=False)
    assert waits.held_up(10.0), "nobody had the time to take the GIL"
    waits.note(10.0, 0.0001, TELLING_S, gave_way=True)
    assert not waits.held_up(10.0)


def test_what_a_call_did_is_told_from_what_it_waited(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float, bool]] = []

    def note(self: Waits, now: float, waited_s: float, worked_s: float, *, gave_way: bool) -> None:
        told.append((waited_s, worked_s, gave_way))

    monkeypatch.setattr(Waits, "note", note)
    assert waits.watch(lambda: time.sleep(0.03) or 7) == 7
    waited_s, worked_s, gave_way = told.pop()
    assert waited_s >= 0.02 and worked_s < 0.02 and gave_way

    def work() -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    waits.watch(work)
    assert told.pop()[1] >= 0.03


def test_it_looks_now_and_then(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs microseconds, and the calls between which it is made are many."""
    now, looks = [10.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Waits, "note", lambda *_, **__: looks.append(now[0]))
    for now[0] in (10.0, 10.001, 10.002, 10.0 + LOOK_S, 10.001 + LOOK_S, 20.0):
        assert waits.watch(max, 3, 7) == 7
    assert looks == [10.0, 10.0 + LOOK_S, 20.0]


@pytest.fixture
def busy() -> Iterator[None]:
    """A thread that runs Python without a pause."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_copy_beside_a_busy_thread_waits(waits: Waits, busy: None) -> None:
    source, destination = np.ones(16 << 20, np.uint8), np.zeros(16 << 20, np.uint8)
    there, here = (np.array([[a.ctypes.data, a.nbytes]], np.uint64) for a in (source, destination))

    def copy() -> bool:
        assert waits.watch(lambda: _libc.read_pairs(os.getpid(), here, there)) == source.nbytes
        return waits.held_up(time.monotonic())

    assert wait_until(copy)
    assert destination[-1] == 1
