"""The pool of helpers: sizes, offers, withdrawal, end."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import pytest

from llm_datadist.transports.movers import Movers, default_mover_count
from tests.support.world import wait_until

WAIT_S = 10


def fake_root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "files", "count"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (6, {}, 5),
        (64, {}, 7),
        (6, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 5),
        (6, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 3),
        (6, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 1),
        (6, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0),
        (
            6,
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n2:memory:/y\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_default_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, files: dict[str, str], count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert default_mover_count(fake_root(tmp_path, files)) == count


def test_default_count_of_this_machine() -> None:
    assert 0 <= default_mover_count() < len(os.sched_getaffinity(0))


def mover_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "llm-datadist-mover"]


def test_threads_start_with_the_first_offer_and_end_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(mover_threads())
    movers, done = Movers(2), threading.Event()
    assert len(mover_threads()) == before
    movers.offer(done.set, 1)
    assert done.wait(WAIT_S)
    assert len(mover_threads()) == before + 2 and all(t.daemon for t in mover_threads())
    movers.close()
    assert len(mover_threads()) == before
    movers.close()
    monkeypatch.delattr(threading.Thread, "start")
    movers.offer(done.set, 1)


def test_a_job_runs_in_as_many_threads_as_asked_for_and_not_more() -> None:
    movers, meeting = Movers(3), threading.Barrier(3)
    names: set[str] = set()

    def job() -> None:
        names.add(str(threading.get_ident()))
        meeting.wait(WAIT_S)

    movers.offer(job, 2)
    meeting.wait(WAIT_S)
    movers.close()
    assert len(names) == 2


def test_offer_of_more_helpers_than_there_are() -> None:
    movers, runs = Movers(1), []
    ended = threading.Event()
    movers.offer(lambda: runs.append(1), 5)
    movers.offer(ended.set, 1)
    assert ended.wait(WAIT_S)
    movers.close()
    assert runs == [1]


def test_without_threads_nothing_runs() -> None:
    movers, runs = Movers(0), []
    movers.offer(lambda: runs.append(1), 3)
    movers.close()
    assert not runs


def test_withdrawn_job_is_not_started() -> None:
    movers, blocked, release = Movers(1), threading.Event(), threading.Event()
    runs: list[str] = []
    ended = threading.Event()

    def first() -> None:
        blocked.set()
        release.wait(WAIT_S)

    def second() -> None:
        runs.append("second")

    movers.offer(first, 1)
    assert blocked.wait(WAIT_S)
    movers.offer(second, 1)
    movers.withdraw(second)
    movers.withdraw(second)
    release.set()
    movers.offer(ended.set, 1)
    assert ended.wait(WAIT_S)
    movers.close()
    assert not runs


def test_an_idle_thread_keeps_no_job_alive() -> None:
    """A job holds its caller's plan, which may be large."""

    class Job:
        def __call__(self) -> None:
            ended.set()

    movers, ended, job = Movers(1), threading.Event(), Job()
    gone = weakref.ref(job)
    movers.offer(job, 1)
    del job
    assert ended.wait(WAIT_S)
    assert wait_until(lambda: gone() is None, WAIT_S)
    movers.close()


def test_closed_pool_forgets_and_refuses_jobs() -> None:
    movers, blocked, release = Movers(1), threading.Event(), threading.Event()
    runs: list[int] = []

    def first() -> None:
        blocked.set()
        release.wait(WAIT_S)

    movers.offer(first, 1)
    assert blocked.wait(WAIT_S)
    movers.offer(lambda: runs.append(1), 1)
    closer = threading.Thread(target=movers.close)
    closer.start()
    assert wait_until(lambda: movers._closed, WAIT_S)
    movers.offer(lambda: runs.append(2), 1)
    release.set()
    closer.join(WAIT_S)
    assert not closer.is_alive() and not runs


def test_a_system_without_threads_leaves_the_work_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    movers = Movers(2)
    movers.offer(lambda: None, 2)
    movers.close()
