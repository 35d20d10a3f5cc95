"""Whether threads of this process wait for the GIL, told by the calls that give it up.

Beside a thread that runs Python without a pause, whoever gives the GIL up waits up to the interpreter's switch
interval (5 ms) to have it back: a copy of many short calls, or by many threads, is mostly waiting then.
Invariant: a thread that the system does not run (a busy machine) is not taken for one that waits.
Threads: all may note; the last one wins, and either is true.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HELD_UP_S = 0.002  # in one call; the switch interval is 5 ms, and who is done sooner has the GIL for less
TELLING_S = 0.001  # of work without the GIL: whoever wants it has had it by then
LOOK_S = 0.005  # from one look to the next: a look costs a few microseconds
REMEMBERED_S = 1.0  # without news: one wrong guess costs no more than that


class Waits:
    """What the calls of an engine's threads have told."""

    __slots__ = ("_look_at", "_until")

    def __init__(self) -> None:
        self._until = self._look_at = -math.inf

    def held_up(self, now: float) -> bool:
        """Whether each further call is likely to be a wait."""
        return now < self._until

    def note(self, now: float, waited_s: float, worked_s: float, *, gave_way: bool) -> None:
        """What a call took, besides and in processor time; ``gave_way``: the thread has waited."""
        if waited_s >= HELD_UP_S and gave_way:
            self._until = now + REMEMBERED_S
        elif waited_s < HELD_UP_S and worked_s >= TELLING_S:
            self._until = -math.inf

    def watch(self, call: Callable[..., T], *args: object) -> T:
        """Makes a call that gives the GIL up once, and notes how it went, unless it has just noted another."""
        began = time.monotonic()
        if began < self._look_at:
            return call(*args)
        self._look_at = began + LOOK_S
        times, worked = times_waited(), time.thread_time()
        result = call(*args)
        worked = time.thread_time() - worked
        now = time.monotonic()
        self.note(now, now - began - worked, worked, gave_way=times_waited() > times)
        return result


def times_waited() -> int:
    """How often this thread has waited for something, the GIL included."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
