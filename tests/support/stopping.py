"""Processes that are stopped (SIGSTOP) and go on: told to stop, a process may still answer once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.world import wait_until


def stop(pid: int) -> None:
    """Stops the process; none of its threads runs when this returns."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: _states(pid) <= {"T", "Z"}, 30), f"process {pid} does not stop: {_states(pid)}"


def cont(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """They are stopped inside, and go on afterwards."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            cont(pid)


def _states(pid: int) -> set[str]:
    """Of its threads; one that has ended counts as a zombie."""
    states = set()
    for tid in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{tid}/stat") as file:
                states.add(file.read().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return states
