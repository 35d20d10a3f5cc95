"""What a test may leave behind in its own process: nothing but idle peers of the pool."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

from tests.support.pool import idle_peers
from tests.support.world import wait_until

FDS_PER_PEER = 2
SHM = "/dev/shm"


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
        threads=frozenset(f"{name} #{i + 1}" for name, count in threads.items() for i in range(count)),
        children=frozenset(_children(os.getpid()) - pids),
        shm=frozenset(_shared_memory()),
    )


def _shared_memory() -> set[str]:
    """Names in /dev/shm, which is the machine's: not those of multiprocessing, which removes its own."""
    if not os.path.isdir(SHM):
        return set()
    return {name for name in os.listdir(SHM) if not name.startswith("sem.mp-")}


def _new_shm(before: Snapshot, after: Snapshot) -> set[str]:
    """Names that were not there; none that only processes beside this one and those below it hold."""
    new = after.shm - before.shm
    if not new:
        return set()
    ours = _with_those_below(os.getpid())
    holders = {int(pid): _held(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()}
    by_us = {name for pid in ours for name in holders.get(pid, ())}
    by_any = {name for names in holders.values() for name in names}
    return {name for name in new if name in by_us or name not in by_any}


def _held(pid: int) -> set[str]:
    """Names of shared memory that a process has open or mapped; none once it has ended."""
    found: list[str] = []
    with suppress(OSError):
        found += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    with suppress(OSError), open(f"/proc/{pid}/maps") as file:
        found += [line.split(maxsplit=5)[5].rstrip() for line in file if f" {SHM}/" in line]
    return {path[len(SHM) + 1 :] for path in found if path.startswith(f"{SHM}/")}


def _with_those_below(pid: int) -> set[int]:
    return {pid}.union(*map(_with_those_below, _children(pid)))


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found |= {int(child) for child in file.read().split()}
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
    for what, new in {
        "threads": after.threads - before.threads,
        "children": after.children - before.children,
        "shm": _new_shm(before, after),
    }.items():
        if new:
            parts.append(f"{what}: {sorted(new)}")
    return "; ".join(parts)


def _same(before: Snapshot, after: Snapshot) -> bool:
    return (
        after.fds <= before.fds
        and after.threads <= before.threads
        and after.children <= before.children
        and not _new_shm(before, after)
    )


def _descriptors() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            targets.append(f"{fd}->{os.readlink('/proc/self/fd/' + fd)}")
        except OSError:
            continue
    return targets
