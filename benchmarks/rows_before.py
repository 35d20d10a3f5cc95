"""What must not become slower: these rows take another checkout (``--before``) and compare its library with ours."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checkouts import BEFORE, NOW, checkouts, pairs
from benchmarks.engines import Kv
from benchmarks.measure import Sample, alternate
from benchmarks.report import Line, at_most, duration
from benchmarks.stage import Bench

KIB = 1024
_CALLS = 3000  # of a turn, at most: the first ones find cold caches
_LINKS = 20  # the same
_WORKLOADS = [(tensors, pulled) for tensors in (1, 2, 32) for pulled in (1, 2, 8, 64)]


def few_local(bench: Bench) -> Iterator[Line]:
    """One and few blocks over local, mode B, one mover: at most 5 % more time than before."""
    for tensors, pulled in _WORKLOADS if not bench.tiny else _WORKLOADS[:1]:
        kv = Kv(tensors, 2 * max(pulled, 8), pulled, 32 * KIB)
        calls = bench.calls(max(10, min(_CALLS, 10000 // (tensors * pulled))))
        samples = _one_by_one(bench, kv, calls)
        workload = str(kv).removeprefix("kv ")
        if BEFORE in samples:
            yield duration(workload, NOW, BEFORE, samples, at_most(1.05))
        else:
            yield Line(workload, NOW, "", samples[NOW].p50 * 1e6, "us", sample=samples[NOW])


def _one_by_one(bench: Bench, kv: Kv, calls: int) -> dict[str, Sample]:
    """Each checkout in turn, alone on the machine, in fresh processes; of its samples the fastest.

    Where its pages and its neighbours lie makes a process up to half slower than another, for as long as it lives:
    of nine tries of the same library the medians differ by that, and the fastest ones by two or three per cent.
    """
    made: dict[str, list[Sample]] = {name: [] for name in checkouts(bench)}
    for _ in range(bench.rounds):
        for name, samples in made.items():
            with pairs(bench, kv, "local", name) as pair:
                samples += alternate({name: pair[name].pulls(calls)}, 1, warm_up=1).values()
    return {name: min(samples, key=lambda sample: sample.p50) for name, samples in made.items()}


def linking(bench: Bench) -> Iterator[Line]:
    """link_clusters and unlink_clusters on one host: at most 2 ms more than before."""
    kv = Kv(1, 16, 1, 32 * KIB)
    calls = bench.calls(_LINKS)
    for backend in ("local", "auto"):
        with pairs(bench, kv, backend) as made:
            samples = alternate({name: pair.links(calls) for name, pair in made.items()}, bench.rounds)
        now, workload = samples[NOW], f"linking and unlinking, {backend}"
        if BEFORE in samples:
            more = (now.p50 - samples[BEFORE].p50) * 1e3
            yield Line(workload, NOW, BEFORE, more, "ms more", at_most(2), now, samples[BEFORE])
        else:
            yield Line(workload, NOW, "", now.p50 * 1e3, "ms", sample=now)
