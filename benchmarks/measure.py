"""Timing for ratios: the candidates take turns, so that whatever else the machine does hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Turn = Callable[[], Sequence[float]]
WARM_UP = 2  # turns that do not count


class Unavailable(Exception):  # noqa: N818 - an answer, not an error
    """This candidate cannot take part here; the text says why."""


@dataclass(frozen=True)
class Candidate:
    """Something that is timed.

    Attributes:
        turn: Makes the calls of one turn and returns the seconds of each.
        pids: The processes whose CPU time it takes.
    """

    turn: Turn
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """What one candidate took: seconds of each call, and CPU seconds of all its processes per call."""

    seconds: tuple[float, ...]
    cpu_s: float | None = None

    @property
    def p50(self) -> float:
        return float(np.percentile(self.seconds, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.seconds, 99))


def timed(call: Callable[[], object], calls: int = 1, pause_s: float = 0.0) -> Turn:
    """A turn of so many calls; the pause before each is outside the clock."""

    def turn() -> list[float]:
        seconds = []
        for _ in range(calls):
            if pause_s:
                time.sleep(pause_s)
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return seconds

    return turn


def alternate(candidates: Mapping[str, Candidate], rounds: int, warm_up: int = WARM_UP) -> dict[str, Sample]:
    """One turn of each candidate per round, in an order that turns by one each round."""
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu_s = dict.fromkeys(names, 0.0)
    for number in range(-warm_up, rounds):
        at = number % max(1, len(names))
        for name in names[at:] + names[:at]:
            before = cpu_seconds(candidates[name].pids)
            taken = candidates[name].turn()
            if number >= 0:
                cpu_s[name] += cpu_seconds(candidates[name].pids) - before
                seconds[name] += taken
    return {
        name: Sample(tuple(taken), cpu_s[name] / len(taken) if candidates[name].pids else None)
        for name, taken in seconds.items()
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that these processes have used so far, by the clock that Linux keeps for each."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # clock_getcpuclockid(3)
