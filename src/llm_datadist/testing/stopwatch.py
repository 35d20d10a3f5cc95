"""Time as a bound may count it: without what threads had to wait for a processor.

"Within 0.5 s" is about the code. On a machine that others keep busy a thread that could run waits first, and the kernel
counts that wait for each thread (``/proc/PID/task/TID/schedstat``), the hypervisor its own (steal, in ``/proc/stat``).
So it is measured: nothing on a quiet machine, and what was missing on a busy one. Any other wait is the code's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

_STEAL = 0  # among thread ids, which start at 1


@dataclass(frozen=True)
class Taken:
    """What something took.

    Attributes:
        elapsed: Seconds from its beginning to its end.
        stalled: Seconds that threads of this process, and of those below it, waited for a processor meanwhile.
    """

    elapsed: float
    stalled: float

    def within(self, seconds: float) -> bool:
        """Whether it took at most ``seconds`` of what the machine gave."""
        return self.elapsed - self.stalled <= seconds

    def about(self, seconds: float) -> bool:
        """Whether it ended at this time: ±20 %, and a moment to notice it."""
        return 0.8 * seconds <= self.elapsed and self.within(1.2 * seconds + 0.1)


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._waits = _waits()
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds by the clock, for what must take at least so long."""
        return time.monotonic() - self.began

    def took(self, until: float | None = None, more: Mapping[int, int] | None = None) -> Taken:
        """What has passed.

        Args:
            until: The end, if it was noted before; an instant of ``time.monotonic``, which all processes share.
            more: Waits of threads that may have ended meanwhile, as of ``own_wait``.
        """
        elapsed = (time.monotonic() if until is None else until) - self.began
        after = {**_waits(), **(more or {})}
        return Taken(elapsed, sum(max(0, ns - self._waits.get(tid, 0)) for tid, ns in after.items()) / 1e9)

    def within(self, seconds: float, until: float | None = None) -> bool:
        """Whether at most ``seconds`` of what the machine gave have passed."""
        ended = time.monotonic() if until is None else until
        return ended - self.began <= seconds or self.took(ended).within(seconds)

    def about(self, seconds: float, until: float | None = None) -> bool:
        """As ``Taken.about``."""
        return self.took(until).about(seconds)

    def __repr__(self) -> str:
        return f"Stopwatch: {self.took()}"


def own_wait(thread: str = "/proc/thread-self") -> int:
    """Nanoseconds that a thread, the calling one if none is named, has waited for a processor since it began."""
    try:
        with open(f"{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):  # it has ended, or this kernel does not count
        return 0


def _waits() -> dict[int, int]:
    waits = {_STEAL: _stolen()}
    for pid in _processes(os.getpid()):
        for tid in _threads(pid):
            waits[tid] = own_wait(f"/proc/{pid}/task/{tid}")
    return waits


def _processes(top: int) -> Iterator[int]:
    """The process and those below it; any of its threads may have started one."""
    yield top
    for tid in _threads(top):
        with suppress(OSError), open(f"/proc/{top}/task/{tid}/children", "rb") as file:
            for pid in file.read().split():
                yield from _processes(int(pid))


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _stolen() -> int:
    """Nanoseconds that a hypervisor kept its processors from this machine."""
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[8]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError):
        return 0
