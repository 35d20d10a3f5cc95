"""What a test may leave behind in its own process: nothing but idle peers of the pool."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, replace

from tests.support.pool import idle_peers
from tests.support.world import wait_until

FDS_PER_PEER = 2


@dataclass(frozen=True)
class Snapshot:
    """Descriptors, threads, children and shared memory, idle peers not counted."""

    fds: int
    threads: frozenset[str]
    children: frozenset[int]
    shm: frozenset[str]


def take() -> Snapshot:
    idle = idle_peers()
    pids = {peer.pid for peer in idle}
    threads = Counter(
        thread.name
        for thread in threading.enumerate()
        # Python keeps a dummy of a thread that it has not started itself, also when that one has long ended.
        if thread.name not in {f"peer-{p}" for p in pids} and not isinstance(thread, threading._DummyThread)
    )
    return Snapshot(
        fds=len(os.listdir("/proc/self/fd")) - FDS_PER_PEER * len(idle),
        threads=frozenset(f"{name} x{count}" for name, count in threads.items()),
        children=frozenset(_children() - pids),
        shm=frozenset(_shared_memory()),
    )


def _shared_memory() -> set[str]:
    """Names in /dev/shm, which is the machine's: not those of multiprocessing, which removes its own."""
    if not os.path.isdir("/dev/shm"):
        return set()
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                found |= {int(pid) for pid in file.read().split()}
        except OSError:
            continue  # the thread has ended
    return found


def differences(before: Snapshot, patience: float = 2.0, *, fds: bool = True) -> str:
    """Empty text when everything is as before, descriptors if wanted; daemon threads get a moment to end."""
    if not fds:
        before = replace(before, fds=sys.maxsize)
    if wait_until(lambda: _same(before, take()), 0.05):
        return ""
    gc.collect()
    if wait_until(lambda: _same(before, take()), patience):
        return ""
    after = take()
    parts = []
    if after.fds > before.fds:
        parts.append(f"{after.fds - before.fds} fds: {_descriptors()}")
    for what in ("threads", "children", "shm"):
        new = getattr(after, what) - getattr(before, what)
        if new:
            parts.append(f"{what}: {sorted(new)}")
    return "; ".join(parts)


def _same(before: Snapshot, after: Snapshot) -> bool:
    return (
        after.fds <= before.fds
        and after.threads <= before.threads
        and after.children <= before.children
        and after.shm <= before.shm
    )


def _descriptors() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(f"{fd}->{os.readlink('/proc/self/fd/' + fd)}")
        except OSError:
            continue
    return targets
