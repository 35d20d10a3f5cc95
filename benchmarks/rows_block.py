"""One block at a time, and a peer whose main thread runs Python in a loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import llm_datadist as dd
from benchmarks.engines import OWNER_ID, Kv
from benchmarks.measure import Candidate, Sample, Turn, alternate, timed
from benchmarks.peers import NIXL
from benchmarks.report import REPORTED, Line, Target, at_least, at_most, duration
from benchmarks.stage import Bench, Stage, offered

KIB = 1024
_CALLS = 200  # of a turn
_PAUSE_S = 0.002  # or a thread that answers keeps the GIL from one call to the next, and never waits for it


def _one_block(kib: int) -> Kv:
    return Kv(1, 16, 1, kib * KIB)


def block_local(bench: Bench) -> Iterator[Line]:
    """Mode B, same host, against NIXL, which makes a request, posts it and polls."""
    calls = bench.calls(_CALLS)
    for kib, target in ((4, REPORTED), (32, at_most(2.5))):
        with Stage(_one_block(kib), 1) as stage:
            offers = {
                "local": lambda: stage.ours("local", threads=0, calls=calls),
                "shm": lambda: stage.ours("shm", pool=True, threads=0, calls=calls),
                "process_vm_readv": lambda: stage.readv(calls),
                NIXL.name: lambda: stage.peer(NIXL).singles(calls),
            }
            yield from _compare(
                bench, f"one {kib} KiB block", offers,
                [("local", NIXL.name, target), ("local", "process_vm_readv", REPORTED), ("shm", "local", REPORTED)],
            )  # fmt: skip


def block_tcp(bench: Bench) -> Iterator[Line]:
    """Mode B over tcp, against a plain request and reply: a Python thread answers both."""
    calls = bench.calls(_CALLS)
    with Stage(_one_block(32), 1) as stage:
        offers = {
            "tcp": lambda: stage.ours("tcp", calls=calls),
            "raw request/reply": lambda: stage.raw_tcp(calls),
        }
        yield from _compare(bench, "one 32 KiB block", offers, [("tcp", "raw request/reply", at_most(2))])


def block_nixl(bench: Bench) -> Iterator[Line]:
    """Mode B over ``nixl``, against a request of NIXL's own. Late in the run, as nixl-32k."""
    calls = bench.calls(_CALLS)
    with Stage(_one_block(32), 1) as stage:
        offers = {
            "nixl": lambda: stage.ours("nixl", calls=calls),
            NIXL.name: lambda: stage.peer(NIXL).singles(calls),
        }
        yield from _compare(bench, "one 32 KiB block", offers, [("nixl", NIXL.name, REPORTED)])


def small_tcp(bench: Bench) -> Iterator[Line]:
    """V3: 1,000 pulls of one block over tcp, the first one, and four threads on one link."""
    calls = bench.calls(1000)
    with Stage(_one_block(4), 1) as stage:
        side, cache = stage.side("tcp")
        pull = side.pull(cache, OWNER_ID, stage.kv)
        (first,) = timed(pull)()
        candidates = {
            "tcp": Candidate(timed(pull, calls), stage.pids),
            "raw request/reply": stage.raw_tcp(calls),
            "tcp, 4 threads": Candidate(_by_threads(pull, 4, calls), stage.pids),
        }
        samples = alternate(candidates, 3 if bench.rounds > 3 else bench.rounds)
    workload = "one 4 KiB block, 1,000 pulls"
    yield duration(workload, "tcp", "raw request/reply", samples, at_most(10))
    worst = max(samples["tcp"].seconds) * 1e3
    yield Line(workload, "tcp", "the slowest pull", worst, "ms", at_most(10))
    yield Line(workload, "tcp", "the first after link", first * 1e3, "ms", at_most(50))
    together = sum(samples["tcp"].seconds) / sum(samples["tcp, 4 threads"].seconds)
    yield Line(
        workload, "tcp, 4 threads", "1 thread", together, "x", at_least(1),
        samples["tcp, 4 threads"], samples["tcp"],
    )  # fmt: skip


def _by_threads(pull: Callable[[], None], threads: int, calls: int) -> Turn:
    """As many pulls in all, by threads at once; the mean time that each adds."""

    def turn() -> list[float]:
        workers = [threading.Thread(target=timed(pull, calls // threads)) for _ in range(threads)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        made = max(1, calls // threads) * threads
        return [(time.perf_counter() - begin) / made] * calls

    return turn


def busy_local(bench: Bench) -> Iterator[Line]:
    """64 blocks, mode B, one mover: the owner's Python is not needed."""
    kv = Kv(1, 128, 64, 32 * KIB)
    with Stage(kv, 1) as stage:
        turn = stage.ours("local", threads=1, calls=bench.calls(50), pause_s=_PAUSE_S).turn
        samples = _busy_and_idle(bench, stage, {"local": Candidate(turn, stage.pids)})
    yield duration(
        "64 blocks of 32 KiB, owner busy", "local, busy owner", "local, idle owner", samples, at_most(1.1)
    )


def busy_tcp(bench: Bench) -> Iterator[Line]:
    """One block from an owner that is busy: its thread waits up to 5 ms for the GIL at each step."""
    calls = bench.calls(20)
    with Stage(_one_block(32), 1) as stage:
        candidates = {
            "tcp": stage.ours("tcp", calls=calls, pause_s=_PAUSE_S),
            "raw": stage.raw_tcp(calls, _PAUSE_S),
        }
        samples = _busy_and_idle(bench, stage, candidates)
    workload = "one 32 KiB block, owner busy"
    yield duration(workload, "tcp, busy owner", "tcp, idle owner", samples)
    yield duration(workload, "tcp, busy owner", "raw, busy owner", samples)


class _Ready(dd.LayerSynchronizer):
    """Every layer is computed already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def layerwise(bench: Bench) -> Iterator[Line]:
    """32 layers of 1 MiB, two tensors each, to a decode that is busy."""
    layers = bench.calls(32)
    kv = Kv(2 * layers, 16, 16, 32 * KIB)
    for backend in ("local", "tcp"):
        with Stage(kv, bench.threads) as stage:
            side, cache = stage.side(backend)
            source, destination = kv.lists()
            config = dd.TransferWithCacheKeyConfig(
                dd.BlocksCacheKey(OWNER_ID, 0), range(layers), range(layers)
            )

            def push(side=side, cache=cache, config=config, lists=(source, destination)) -> None:  # type: ignore[no-untyped-def]
                task = side.dist.cache_manager.transfer_cache_async(cache, _Ready(), [config], *lists)
                code = task.synchronize()
                if code != dd.LLMStatusCode.LLM_SUCCESS:
                    raise RuntimeError(f"the layer-wise task ended with {code}")

            samples = _busy_and_idle(bench, stage, {backend: Candidate(timed(push), stage.pids)})
        workload = f"{layers} layers of 1 MiB, decode busy"
        busy, idle = samples[f"{backend}, busy owner"], samples[f"{backend}, idle owner"]
        extra = (busy.p50 - idle.p50) * 1e3
        yield Line(
            workload,
            f"{backend}, busy",
            f"{backend}, idle",
            extra,
            "ms more",
            at_most(2 * layers),
            busy,
            idle,
        )


def _busy_and_idle(bench: Bench, stage: Stage, candidates: dict[str, Candidate]) -> dict[str, Sample]:
    """Each candidate with the owner's main thread idle and running Python, by turns."""

    def turn(candidate: Candidate, busy: bool) -> Turn:
        def run() -> Sequence[float]:
            stage.owner.call("busy", on=busy)
            try:
                return candidate.turn()
            finally:
                stage.owner.call("busy", on=False)

        return run

    both = {
        f"{name}, {state} owner": Candidate(turn(candidate, state == "busy"), candidate.pids)
        for name, candidate in candidates.items()
        for state in ("idle", "busy")
    }
    return alternate(both, bench.rounds)


def _compare(
    bench: Bench,
    workload: str,
    offers: dict[str, Callable[[], Candidate]],
    checks: list[tuple[str, str, Target]],
) -> Iterator[Line]:
    candidates, refused = offered(offers, [(ours, against) for ours, against, _ in checks])
    samples = alternate(candidates, bench.rounds)
    for ours, against, target in checks:
        note = refused.get(ours) or refused.get(against)
        if note:
            yield Line(workload, ours, against, target=target, note=note)
        else:
            yield duration(workload, ours, against, samples, target)
