"""Bounds of time on a busy machine: what threads waited for a processor is not counted, everything else is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist.testing import stopwatch
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support.peers import Peer, PeerDied
from tests.support.pool import Spawner
from tests.support.world import World, wait_until

SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.fixture
def crowd() -> Iterator[None]:
    """Three processes that spin on one processor, the only one of the calling thread."""
    before = os.sched_getaffinity(0)
    cpu = min(before)
    spinners = [
        subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)], stdout=subprocess.PIPE) for _ in range(3)
    ]
    for spinner in spinners:
        assert spinner.stdout is not None and spinner.stdout.readline()
    os.sched_setaffinity(0, {cpu})
    yield
    os.sched_setaffinity(0, before)
    for spinner in spinners:
        spinner.kill()
        spinner.communicate()


def _work(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_g11_what_a_thread_waited_for_a_processor_is_not_counted(crowd: None) -> None:
    with _looking_at(os.getpid()):
        watch = Stopwatch()
        _work(0.3)
        assert watch.elapsed > 0.6, "nobody else used the processor"
        assert watch.within(0.6)


def test_g11_any_other_wait_is_counted(crowd: None) -> None:
    with _looking_at(os.getpid()):
        watch = Stopwatch()
        threading.Event().wait(0.5)
        assert not watch.within(0.3)


@contextmanager
def _looking_at(*pids: int) -> Iterator[None]:
    """Not at all processes below this one: the crowd is among them, and waits as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopwatch, "_processes", lambda top: iter(pids))
        yield


def test_g11_a_bound_that_was_kept_by_the_clock_is_kept() -> None:
    assert Taken(0.4, 0.0).within(0.5) and not Taken(0.6, 0.0).within(0.5)
    assert Taken(0.6, 0.2).within(0.5)
    assert not Taken(0.7, 0.0).about(1.0), "too early, however busy the machine"
    assert not Taken(0.7, 0.9).about(1.0)
    assert Taken(2.0, 0.9).about(1.0) and not Taken(2.0, 0.0).about(1.0)


def _spin(w: World, cpu_s: float) -> None:
    _work(cpu_s)


def test_g11_the_time_of_a_call_knows_what_its_thread_waited(crowd: None, spawn: Spawner) -> None:
    """Also though that thread has ended when the answer is read."""
    peer = spawn(env={"LLM_DATADIST_TESTS": "a process of its own"})
    with _looking_at():
        took = peer.attempt(_spin, 0.2).took
    assert took.elapsed > 0.4, "nobody else used the processor"
    assert took.within(0.4)


def test_g11_a_stopped_process_runs_no_thread(spawn: Spawner) -> None:
    peer = spawn()
    peer.start(_spin, 20.0)
    peer.stop()
    before = _cpu_ticks(peer.pid)
    threading.Event().wait(0.2)
    assert _cpu_ticks(peer.pid) == before
    peer.kill()


def _cpu_ticks(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[11:13]


def test_g20_a_process_that_cannot_start_leaves_nothing_behind() -> None:
    """What is left is looked at after each test."""
    peer = Peer(prefix=("false",))
    assert wait_until(lambda: not peer.alive)
    with pytest.raises(PeerDied):
        peer.call(_spin, 0.0)
    peer.close()
