"""Timing for ratios: the candidates take turns, so that whatever else the machine does hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """What one candidate took, in seconds."""

    median: float
    best: float
    worst: float


def alternate(
    candidates: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, Sample]:
    """Runs every candidate once per round, in an order that turns by one each round."""
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            begin = time.perf_counter()
            candidates[name]()
            taken = time.perf_counter() - begin
            if turn >= 0:
                times[name].append(taken)
    return {name: Sample(statistics.median(t), min(t), max(t)) for name, t in times.items()}
