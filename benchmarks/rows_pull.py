"""Whole transfers: many scattered blocks in one pull."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.engines import OWNER_ID, Kv
from benchmarks.measure import Candidate, Sample, Unavailable, alternate, timed
from benchmarks.peers import MOONCAKE, NIXL, NIXL_TCP
from benchmarks.relay import Relay
from benchmarks.report import REPORTED, Line, Target, at_least, at_most, speed
from benchmarks.stage import Bench, Stage, offered

KIB = 1024


@dataclass(frozen=True)
class Check:
    """Two candidates to compare."""

    ours: str
    against: str
    target: Target = REPORTED


def compare(
    bench: Bench, kv: Kv, offers: Mapping[str, Callable[[], Candidate]], checks: Sequence[Check]
) -> Iterator[Line]:
    """One run of all that can take part, then a line for each check."""
    candidates, refused = offered(offers, [(check.ours, check.against) for check in checks])
    samples = alternate(candidates, bench.rounds)
    for check in checks:
        yield _line(kv, check, samples, refused)


def _line(kv: Kv, check: Check, samples: dict[str, Sample], refused: dict[str, str]) -> Line:
    for name in (check.ours, check.against):
        if name in refused:
            return Line(str(kv), check.ours, check.against, target=check.target, note=refused[name])
    return speed(str(kv), check.ours, check.against, samples, kv.nbytes, check.target)


def local_32k(bench: Bench) -> Iterator[Line]:
    """``local`` against the bare system call and the peers."""
    kv = bench.kv(64, 32 * KIB)
    with Stage(kv, bench.threads) as stage:
        offers = {
            "local": lambda: stage.ours("local"),
            "local, mode A": lambda: stage.ours("local", "A"),
            "process_vm_readv": stage.readv,
            "plain copy": stage.plain_copy,
            NIXL.name: lambda: stage.peer(NIXL).turns(),
            MOONCAKE.name: lambda: stage.peer(MOONCAKE).turns(),
        }
        checks = (
            Check("local", "process_vm_readv", at_least(0.92)),
            Check("local, mode A", "process_vm_readv"),
            Check("local", NIXL.name, at_least(4)),
            Check("local", MOONCAKE.name, at_least(3.5)),
            Check("local", "plain copy"),
        )
        yield from compare(bench, kv, offers, checks)


def local_4k(bench: Bench) -> Iterator[Line]:
    """Small blocks."""
    yield from _local(bench, bench.kv(64, 4 * KIB), at_least(6))


def local_128k(bench: Bench) -> Iterator[Line]:
    """Large blocks."""
    yield from _local(bench, bench.kv(32, 128 * KIB), REPORTED)


def _local(bench: Bench, kv: Kv, against_nixl: Target) -> Iterator[Line]:
    with Stage(kv, bench.threads) as stage:
        offers = {
            "local": lambda: stage.ours("local"),
            "process_vm_readv": stage.readv,
            NIXL.name: lambda: stage.peer(NIXL).turns(),
            MOONCAKE.name: lambda: stage.peer(MOONCAKE).turns(),
        }
        checks = (
            Check("local", "process_vm_readv"),
            Check("local", NIXL.name, against_nixl),
            Check("local", MOONCAKE.name),
        )
        yield from compare(bench, kv, offers, checks)


def shm_32k(bench: Bench) -> Iterator[Line]:
    """Pools that are mapped, against a copy by indices within one process."""
    kv = bench.kv(64, 32 * KIB)
    with Stage(kv, bench.threads) as stage:
        offers = {
            "shm pools": lambda: stage.ours("shm", pool=True),
            "local pools": lambda: stage.ours("local", pool=True),
            "dst[di] = src[si]": stage.indexed_copy,
        }
        checks = (
            Check("shm pools", "dst[di] = src[si]", at_least(0.90)),
            Check("shm pools", "local pools"),
        )
        yield from compare(bench, kv, offers, checks)


def shm_4k(bench: Bench) -> Iterator[Line]:
    """Where mapped memory must be faster: small blocks, of the same pools and of ordinary memory."""
    kv = bench.kv(64, 4 * KIB)
    with Stage(kv, bench.threads) as stage:
        offers = {
            "shm pools": lambda: stage.ours("shm", pool=True),
            "local pools": lambda: stage.ours("local", pool=True),
            "local": lambda: stage.ours("local"),
        }
        checks = (Check("shm pools", "local pools", at_least(1.3)), Check("shm pools", "local"))
        yield from compare(bench, kv, offers, checks)


def sizes(bench: Bench) -> Iterator[Line]:
    """``shm`` against ``local`` on the same pools, by block size: where the choice changes."""
    ratios: dict[int, float] = {}
    for exponent in (9, 12) if bench.tiny else range(9, 19):
        pulled = max(8, min(128, (128 << 20) // (32 << exponent)))
        kv = bench.kv(32, 1 << exponent, pulled)
        with Stage(kv, bench.threads) as stage:
            offers = {name: (lambda n=name: stage.ours(n, pool=True)) for name in ("shm", "local")}
            for line in compare(bench, kv, offers, [Check("shm", "local")]):
                if line.value is not None:
                    ratios[kv.block_nbytes] = line.value
                yield line
    if ratios:
        faster = list(takewhile(lambda size: ratios[size] > 1, ratios))  # they ascend
        yield Line("shm is faster up to", "shm", "local", max(faster, default=0) / KIB, "KiB")


def tcp_32k(bench: Bench) -> Iterator[Line]:
    """``tcp`` against one plain connection and the peers over tcp."""
    kv = bench.kv(32, 32 * KIB)
    with Stage(kv, bench.threads) as stage:
        offers = {
            "tcp": lambda: stage.ours("tcp"),
            "raw connection": stage.raw_tcp,
            "sendmsg/recvmsg_into": stage.scattered_tcp,
            NIXL_TCP.name: lambda: stage.peer(NIXL_TCP).turns(),
            MOONCAKE.name: lambda: stage.peer(MOONCAKE).turns(),
        }
        checks = (
            Check("tcp", "raw connection", at_least(0.90)),
            Check("tcp", "sendmsg/recvmsg_into"),
            Check("tcp", NIXL_TCP.name, at_least(1.8)),
            Check("tcp", MOONCAKE.name, at_least(1.4)),
        )
        yield from compare(bench, kv, offers, checks)


def nixl_32k(bench: Bench) -> Iterator[Line]:
    """``nixl``, our use of NIXL, against NIXL itself. Late in the run: it brings UCX into this process."""
    kv = bench.kv(32, 32 * KIB)
    with Stage(kv, bench.threads) as stage:
        offers = {
            "nixl": lambda: stage.ours("nixl"),
            NIXL.name: lambda: stage.peer(NIXL).turns(),
        }
        yield from compare(bench, kv, offers, [Check("nixl", NIXL.name)])


def linear(bench: Bench) -> Iterator[Line]:
    """Cost per byte as a pull grows, and that of the bare system call: the same memory, other blocks each time."""
    memory = bench.kv(32, 32 * KIB, 2048, 2560)
    parts = {
        16 // part: Kv(memory.tensors, memory.blocks, max(1, memory.pulled // part), memory.block_nbytes)
        for part in (16, 4, 1)
    }
    with Stage(memory, bench.threads) as stage:
        side, cache = stage.side("local")
        candidates = {}
        for times, kv in parts.items():
            seeds = range(16 // times)
            calls: dict[str, list[Callable[[], object]]] = {
                "local": [side.pull(cache, OWNER_ID, kv, seed) for seed in seeds],
                "process_vm_readv": [stage.readv_of(kv, seed) for seed in seeds],
            }
            for name in calls:
                candidates[f"{name} {times}x"] = Candidate(_in_turn(calls[name]), stage.pids)
        samples = alternate(candidates, bench.rounds)
    workload = f"kv 32 KiB, {', '.join(f'{kv.nbytes / 2**20:g}' for kv in parts.values())} MiB"
    for name, target in (("local", at_most(1.15)), ("process_vm_readv", REPORTED)):
        costs = {times: samples[f"{name} {times}x"].p50 / kv.nbytes for times, kv in parts.items()}
        note = ", ".join(f"{times}x {cost * 2**30 * 1e3:.3g} ms/GiB" for times, cost in costs.items())
        spread = max(costs.values()) / min(costs.values())
        yield Line(workload, name, "cheapest size", spread, "x cost", target, note=note)


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], Sequence[float]]:
    """As many bytes in every turn: several small pulls or one large; the mean of a pull."""

    def turn() -> list[float]:
        return [sum(seconds for call in calls for seconds in timed(call)()) / len(calls)]

    return turn


def many_tensors(bench: Bench) -> Iterator[Line]:
    """V1: 183 tensors of 2,000 scattered blocks of 1 KiB; and what asking for them over tcp sends."""
    kv = bench.kv(183, KIB, 2000)
    with Stage(kv, bench.threads) as stage:
        offers = {"local": lambda: stage.ours("local"), "process_vm_readv": stage.readv}
        candidates, refused = offered(offers, [("local", "process_vm_readv")])
        samples = alternate(candidates, bench.rounds)
        if not refused:
            line = speed(str(kv), "local", "process_vm_readv", samples, kv.nbytes)
            time_ratio = 1 / (line.value or 1)
            yield Line(
                line.workload, line.ours, line.against, time_ratio, "x time", at_most(1.5), line.sample,
                line.reference, kv.nbytes,
            )  # fmt: skip
        for mode in "AB":
            try:
                sent = _request_nbytes(stage, mode)
            except Unavailable as exc:
                yield Line(str(kv), f"tcp, mode {mode}", note=str(exc))
            else:
                yield Line(str(kv), f"tcp, mode {mode}", "bytes sent to ask", sent / KIB, "KiB", at_most(64))


def _request_nbytes(stage: Stage, mode: str) -> int:
    with Relay() as relay:
        side, cache = stage.side("tcp", mode, through=relay)
        pull = side.pull(cache, OWNER_ID, stage.kv)
        pull()
        before = relay.sent
        pull()
        return relay.sent - before
