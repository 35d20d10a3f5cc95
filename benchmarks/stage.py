"""What the rows share: this process as the reader, another as the owner, and the candidates between them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import llm_datadist as dd
from benchmarks import references
from benchmarks.engines import OWNER_ID, READER_ID, Kv, Side, pool_nbytes, views
from benchmarks.measure import Candidate, Unavailable, timed
from benchmarks.peers import Peer, PeerProcesses
from benchmarks.relay import Relay
from benchmarks.worker import SEED, Worker
from llm_datadist.testing.owner import pattern

MIN_ROUNDS = 7
ME = os.getpid()


@dataclass(frozen=True)
class Bench:
    """How a run is made.

    Attributes:
        rounds: Of every comparison.
        threads: Movers of local and shm, and of their references.
        tiny: Sizes and durations that only show that everything runs.
        before: Another checkout, whose library takes turns with this one where a row compares the two.
    """

    rounds: int
    threads: int
    tiny: bool
    before: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Bench:
        return cls(options.rounds, options.threads, options.tiny, options.before)

    def kv(self, tensors: int, block_nbytes: int, pulled: int = 128, blocks: int = 0) -> Kv:
        if self.tiny:
            tensors, pulled, blocks = min(tensors, 2), min(pulled, 8), 0
        return Kv(tensors, blocks or 2 * pulled, pulled, block_nbytes)

    def calls(self, number: int) -> int:
        return min(number, 3) if self.tiny else number

    def seconds(self, number: float) -> float:
        return min(number, 0.05) if self.tiny else number


class Stage:
    """One workload, and whoever can move it. Close it: it holds processes and memory."""

    def __init__(self, kv: Kv, threads: int) -> None:
        self.kv = kv
        self.threads = threads
        self._stack = ExitStack()
        self.owner = Worker(environment())
        self._stack.callback(self.owner.close)
        self.pids = (ME, self.owner.pid)
        self._arrays = [np.zeros(kv.tensor_nbytes, np.uint8) for _ in range(kv.tensors)]
        for array in self._arrays:
            array.fill(0xA5)
        self.crew = references.Crew(threads)
        self._stack.callback(self.crew.close)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def source(self) -> list[int]:
        """Addresses of the owner's NumPy memory."""
        return list(self.owner.call("memory", kv=vars(self.kv)))

    @property
    def destination(self) -> list[int]:
        return [int(array.ctypes.data) for array in self._arrays]

    def side(
        self, backend: str, mode: str = "B", pool: bool = False, threads: int | None = None,
        through: Relay | None = None, destination: Sequence[int] = (),
    ) -> tuple[Side, dd.Cache]:  # fmt: skip
        """Our engine with its cache, linked with one of the owner.

        Args:
            backend: The transport to force.
            mode: "A" or "B".
            pool: Both caches are of pool memory.
            threads: Movers, if not the stage's.
            through: Dial the owner through it.
            destination: Addresses of our tensors, if not the stage's.
        """
        count = self.threads if threads is None else threads
        told = self.owner.call("own", kv=vars(self.kv), backend=backend, mode=mode, pool=pool, threads=count)
        room = pool_nbytes(self.kv) if pool else 0
        reader = Side(READER_ID, backend, mode=mode, threads=count, pool_nbytes=room)
        self._stack.callback(reader.close)
        ordinary = destination or self.destination
        cache = reader.allocate(self.kv, 0) if pool else reader.register(self.kv, ordinary)
        reader.link(OWNER_ID, through.to(tuple(told["address"])) if through else told["address"])
        return reader, cache

    def ours(
        self, backend: str, mode: str = "B", pool: bool = False, threads: int | None = None, calls: int = 1,
        pause_s: float = 0.0,
    ) -> Candidate:  # fmt: skip
        """``pull_blocks`` over this transport; it has been checked to bring the right bytes."""
        reader, cache = self.side(backend, mode, pool, threads)
        call = reader.pull(cache, OWNER_ID, self.kv)
        self._check(call, cache.tensor_addrs[-1])
        return Candidate(timed(call, calls, pause_s), self.pids)

    def _check(self, call: Callable[[], object], tensor: int) -> None:
        """A benchmark that moves nothing is fast: looks at the last block of the last tensor."""
        size = self.kv.block_nbytes
        source, destination = (
            slice(blocks[-1] * size, blocks[-1] * size + size) for blocks in self.kv.lists()
        )
        expected = pattern(SEED + self.kv.tensors - 1, self.kv.tensor_nbytes)[source]
        (view,) = views([tensor], self.kv.tensor_nbytes)
        view[destination] = ~expected
        call()
        if not np.array_equal(view[destination], expected):
            raise RuntimeError(f"{self.kv}: the last block is not what its owner has")

    def readv(self, calls: int = 1) -> Candidate:
        """The bare system call on the same memory."""
        return Candidate(timed(self.readv_of(self.kv), calls), self.pids)

    def readv_of(self, kv: Kv, seed: int = 0) -> references.Call:
        """One such call for some of the blocks."""
        source, destination = kv.lists(seed)
        size = kv.block_nbytes
        here = references.iovecs(self.destination, destination, size)
        there = references.iovecs(self.source, source, size)
        return references.readv(self.owner.pid, here, there, self.crew)

    def raw_tcp(self, calls: int = 1, pause_s: float = 0.0) -> Candidate:
        """As many contiguous bytes over one connection, or request and reply of one block."""
        (region,) = self.owner.call("memory", kv=vars(Kv(1, 1, 1, self.kv.nbytes)))
        port = self.owner.call("answer_plain", address=region, nbytes=self.kv.nbytes)
        return Candidate(timed(references.raw_tcp(port, self.kv.nbytes), calls, pause_s), self.pids)

    def scattered_tcp(self) -> Candidate:
        """The same blocks over one connection, by sendmsg and recvmsg_into."""
        port = self.owner.call("answer_scattered", kv=vars(self.kv))
        _, destination = self.kv.lists()
        size = self.kv.block_nbytes
        blocks = [a.data[i * size : (i + 1) * size] for a in self._arrays for i in destination]
        return Candidate(timed(references.scattered_tcp(port, blocks)), self.pids)

    def indexed_copy(self) -> Candidate:
        """``dst[di] = src[si]`` within this process."""
        shape = (self.kv.blocks, self.kv.block_nbytes)
        sources = [pattern(SEED + i, self.kv.tensor_nbytes).reshape(shape) for i in range(self.kv.tensors)]
        destinations = [array.reshape(shape) for array in self._arrays]
        source, destination = (np.array(blocks) for blocks in self.kv.lists())
        call = references.indexed_copy(destinations, sources, destination, source, self.crew)
        return Candidate(timed(call), (ME,))

    def plain_copy(self) -> Candidate:
        """One contiguous copy within this process."""
        return Candidate(timed(references.plain_copy(self.kv.nbytes, self.crew, self.threads)), (ME,))

    def peer(self, which: Peer) -> PeerProcesses:
        """The same workload between two processes of another library."""
        processes = PeerProcesses(which)
        self._stack.callback(processes.close)
        processes.prepare(self.kv)
        return processes


def offered(
    offers: Mapping[str, Callable[[], Candidate]], pairs: Iterable[tuple[str, str]]
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates of these pairs that can take part, and why the others cannot.

    What would only be compared with one that cannot is not asked.
    """
    candidates: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for names in pairs:
        for name in names:
            try:
                if name not in candidates and name not in refused:
                    candidates[name] = offers[name]()
            except Unavailable as exc:
                refused[name] = str(exc)
            if name in refused:
                break
    return candidates, refused


def environment() -> dict[str, str]:
    """For the other processes: they find what we find."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
