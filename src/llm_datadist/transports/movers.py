"""A small pool of threads that help a caller move bytes.

Strategy: a caller offers its job to the pool and works on it itself; a job hands out its own pieces, so
that a mover that comes late, or never, is not missed. Threads start when first needed, on a thread that no
signal strikes: an interrupt between a start and its note would leave a thread that nobody joins.
Invariants: nothing here spins; a withdrawn job is not started any more; ``close`` joins every thread.
Threads: every method may be called from any thread except a mover's own (``close`` joins them).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llm_datadist._shortages import is_shortage, start_thread
from llm_datadist._waiting import Changes, guard
from llm_datadist.status import OutOfMemoryError
from llm_datadist.transports._waits import Waits

Job = Callable[[], None]
Elsewhere = Callable[[Callable[[], bool]], bool]
_IDLE_S = 60.0  # a look once in a while is enough: a mover that nobody woke is not missed

# Beyond a few threads one process's copies only contend for the memory controllers; engines want the cores.
MAX_THREADS = 8


def default_mover_count(root: Path = Path("/")) -> int:
    """Helpers beside the caller that this process may use: CPU affinity and cgroup quota, capped.

    Args:
        root: Where /proc and /sys are, for tests.

    Raises:
        OSError: There is no descriptor to look with.
    """
    cpus = float(len(os.sched_getaffinity(0)))
    for quota in _cgroup_cpus(root):
        cpus = min(cpus, quota)
    return max(0, min(int(cpus), MAX_THREADS) - 1)


def _cgroup_cpus(root: Path) -> list[float]:
    """CPU quotas of this process's cgroup and all above it (v2), or of its cpu controller (v1)."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parents = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        if not controllers:
            quotas += [_text(root / "sys/fs/cgroup" / p / "cpu.max").split() for p in parents]
        elif "cpu" in controllers.split(","):
            v1 = [root / "sys/fs/cgroup/cpu" / p for p in parents]
            quotas += [
                [_text(p / "cpu.cfs_quota_us").strip(), _text(p / "cpu.cfs_period_us").strip()] for p in v1
            ]
    return [int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdigit() and q[1].isdigit()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as exc:
        if is_shortage(exc):
            raise
        return ""


def _here(job: Callable[[], bool]) -> bool:
    return job()


class Movers:
    """At most ``count`` daemon threads; 0 means that callers move everything themselves.

    Attributes:
        count: The threads.
        waits: What callers and threads have noted about the GIL.
        elsewhere: Does a job on a thread that no signal strikes, and waits for it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.elsewhere: Elsewhere = _here
        self.waits = Waits()
        self._jobs: deque[Job] = deque()
        self._lock = guard(self)
        self._changes = Changes(self._lock, _IDLE_S)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def offer(self, job: Job, helpers: int) -> None:
        """Lets up to ``helpers`` threads run ``job``, each once, as soon as they are free."""
        with self._lock:
            if self._closed:
                return
            self._jobs.extend([job] * min(helpers, self.count))
        if len(self._threads) < self.count:
            self.elsewhere(self._start_threads)
        self._changes.notify_all()

    def withdraw(self, job: Job) -> None:
        """Forgets the offers of ``job`` that no thread has begun."""
        with self._lock:
            while job in self._jobs:
                self._jobs.remove(job)

    def close(self) -> None:
        """Starts no further job and joins the threads. Idempotent."""
        with self._lock:
            self._closed = True
            self._changes.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _start_threads(self) -> bool:
        """Whether all have been started."""
        with self._lock, suppress(OutOfMemoryError):  # callers move everything themselves
            while len(self._threads) < self.count and not self._closed:
                self._threads.append(start_thread(self._run, "llm-datadist-mover"))
        return len(self._threads) == self.count

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changes.wait_for(lambda: self._jobs or self._closed, threading.TIMEOUT_MAX)
                if self._closed:
                    return
                job = self._jobs.popleft()
            job()
            del job  # an idle thread must not keep a caller's plan alive
