"""What must not become slower: these rows take another checkout (``--before``) and compare its library with ours."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checkouts import BEFORE, NOW, Pair, pairs
from benchmarks.engines import Kv
from benchmarks.measure import Candidate, alternate
from benchmarks.report import Line, at_most, duration
from benchmarks.stage import Bench

KIB = 1024
_CALLS = 200  # of a turn
_LINKS = 20  # the same
_WORKLOADS = [(tensors, pulled) for tensors in (1, 2, 32) for pulled in (1, 2, 8, 64)]


def few_local(bench: Bench) -> Iterator[Line]:
    """One and few blocks over local, mode B, one mover: at most 5 % more time than before."""
    for tensors, pulled in _WORKLOADS if not bench.tiny else _WORKLOADS[:1]:
        kv = Kv(tensors, 2 * max(pulled, 8), pulled, 32 * KIB)
        calls = bench.calls(max(10, min(_CALLS, 2000 // (tensors * pulled))))
        with pairs(bench, kv, "local") as made:
            samples = alternate(_offered(made, calls), bench.rounds)
        workload = str(kv).removeprefix("kv ")
        if BEFORE in samples:
            yield duration(workload, NOW, BEFORE, samples, at_most(1.05))
        else:
            yield Line(workload, NOW, "", samples[NOW].p50 * 1e6, "us", sample=samples[NOW])


def _offered(made: dict[str, Pair], calls: int) -> dict[str, Candidate]:
    return {name: pair.pulls(calls) for name, pair in made.items()}


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
