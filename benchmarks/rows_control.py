"""What is not copying: planning, registering, and what other threads of the process notice."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

import llm_datadist as dd
from benchmarks.engines import OWNER_ID, READER_ID, Kv
from benchmarks.measure import Candidate, Turn, alternate
from benchmarks.report import REPORTED, Line, Target, at_least, at_most
from benchmarks.stage import ME, MIN_ROUNDS, Bench, Stage
from benchmarks.worker import SEED
from llm_datadist.testing.owner import pattern

KIB = 1024


def planning(bench: Bench) -> Iterator[Line]:
    """From the call of ``pull_blocks`` to the first byte that has moved, seen by another process."""
    many = bench.kv(122, KIB, 2000)
    most = bench.kv(2, 64, 1_000_000, 1_000_000)
    yield _first_byte(bench, many, False, at_most(2))
    yield _first_byte(bench, many, True, REPORTED)
    yield _first_byte(bench, most, False, at_most(1000))
    yield _first_byte(bench, most, True, REPORTED)


def _first_byte(bench: Bench, kv: Kv, arrays: bool, target: Target) -> Line:
    """The destination is a shared file; the other process looks at the first block of the list in it."""
    source, destination = kv.lists()
    lists = (np.array(source), np.array(destination)) if arrays else (source, destination)
    first = destination[0] * kv.block_nbytes
    brought = pattern(SEED, kv.tensor_nbytes)[source[0] * kv.block_nbytes]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file, Stage(kv, 1) as stage:
        file.truncate(kv.tensors * kv.tensor_nbytes)
        memory = np.memmap(file.name, np.uint8, "r+")
        memory.fill(0)
        parts = np.split(memory, kv.tensors)
        side, cache = stage.side("local", destination=[int(part.ctypes.data) for part in parts])

        def turn() -> list[float]:
            memory[first] = brought ^ 0xFF
            stage.owner.call("watch", path=file.name, offset=first)
            begin = time.monotonic_ns()
            side.dist.cache_manager.pull_blocks(dd.BlocksCacheKey(OWNER_ID, 0), cache, *lists)
            return [(stage.owner.call("seen") - begin) / 1e9]

        sample = alternate({"local": Candidate(turn)}, bench.rounds)["local"]
    workload = f"{kv.tensors} tensors x {kv.pulled:,} blocks"
    form = "local, arrays" if arrays else "local, lists"
    return Line(workload, form, "until the first byte", sample.p50 * 1e3, "ms", target, sample)


def registering(bench: Bench) -> Iterator[Line]:
    """A cache of 1,000 tensors, while a peer is linked that is told of it."""
    kv = bench.kv(1000, 4 * KIB, 8)
    with Stage(kv, 1) as stage:
        side, cache = stage.side("local")
        manager = side.dist.cache_manager
        manager.unregister_cache(cache.cache_id)
        desc, addresses = cache.cache_desc, list(cache.tensor_addrs)

        def turn() -> list[float]:
            begin = time.perf_counter()
            registered = manager.register_blocks_cache(desc, addresses, dd.BlocksCacheKey(READER_ID, 0))
            seconds = time.perf_counter() - begin
            manager.unregister_cache(registered.cache_id)
            return [seconds]

        sample = alternate({"register": Candidate(turn)}, bench.rounds)["register"]
    yield Line("registering 1,000 tensors", "register", "", sample.p50 * 1e3, "ms", at_most(50), sample)


def sleeper(bench: Bench) -> Iterator[Line]:
    """How often a thread that sleeps 1 ms in a loop comes by while its process pulls, against its idle rate."""
    seconds = bench.seconds(2.0)
    kv = bench.kv(32, 32 * KIB)
    with Stage(kv, bench.threads) as stage:
        moves: dict[str, Callable[[], object]] = {"idle": lambda: time.sleep(seconds)}
        for name, candidate in {"local": stage.ours("local"), "process_vm_readv": stage.readv()}.items():
            moves[name] = _for_seconds(candidate.turn, seconds)
        candidates = {name: Candidate(_sleeping_beside(move), (ME,)) for name, move in moves.items()}
        samples = alternate(candidates, min(bench.rounds, MIN_ROUNDS), warm_up=0)
    workload = f"thread sleeping 1 ms, {seconds:g} s"
    for name, target in (("local", at_least(0.9)), ("process_vm_readv", REPORTED)):
        ratio = samples["idle"].p50 / samples[name].p50
        yield Line(workload, f"{name}, pulling", "idle", ratio, "x", target, samples[name], samples["idle"])


def _for_seconds(call: Callable[[], object], seconds: float) -> Callable[[], None]:
    def run() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()

    return run


def _sleeping_beside(move: Callable[[], object]) -> Turn:
    """Seconds of one sleep of 1 ms, on average, while ``move`` runs."""

    def turn() -> list[float]:
        count, ended = 0, False

        def sleep() -> None:
            nonlocal count
            while not ended:
                time.sleep(0.001)
                count += 1

        thread = threading.Thread(target=sleep)
        begin = time.perf_counter()
        thread.start()
        move()
        ended = True
        taken = time.perf_counter() - begin
        made = count
        thread.join()
        return [taken / max(1, made)]

    return turn
