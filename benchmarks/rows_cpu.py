"""CPU time of processes that should need little of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

import llm_datadist as dd
from benchmarks.engines import OWNER_ID, READER_ID, Kv, Side
from benchmarks.measure import Unavailable, cpu_seconds
from benchmarks.netns import joined
from benchmarks.report import Line, at_most
from benchmarks.stage import ME, Bench, environment
from benchmarks.worker import Worker

KIB = 1024
_RATE = ("rate", "80mbit", "burst", "256kb", "latency", "400ms")  # 10 MB/s
_PEERS = 4
_HUB_ID = 100


def idle(bench: Bench) -> Iterator[Line]:
    """10 s of one linked pair, and of a process with four links (V2), at the same time."""
    seconds = bench.seconds(10.0)
    kv = vars(Kv(2, 16, 8, 32 * KIB))
    workers = [Worker(environment()) for _ in range(_PEERS + 1 + 2)]
    try:
        owner, reader, hub, *peers = workers
        _link(kv, reader, owner, OWNER_ID)
        for cluster_id, peer in enumerate(peers, OWNER_ID):
            _link(kv, hub, peer, cluster_id)
        before = [cpu_seconds((worker.pid,)) for worker in workers]
        time.sleep(seconds)
        used = [cpu_seconds((w.pid,)) - b for w, b in zip(workers, before, strict=True)]
    finally:
        for worker in workers:
            worker.close()
    workload = f"idle for {seconds:g} s"
    yield Line(workload, "1 link, both sides", "", used[0] + used[1], "CPU s", at_most(0.05))
    yield Line(workload, f"{_PEERS} links, one side", "", used[2], "CPU s", at_most(0.05))


def throttled(bench: Bench) -> Iterator[Line]:
    """A pull of 5 s over a link of 10 MB/s."""
    seconds = bench.seconds(5.0)
    kv = vars(Kv(2, 16, 16, max(KIB, int(seconds * 10e6) // 32)))
    try:
        with joined(_RATE) as (near, far):
            owner = Worker(environment(), far.prefix)
            reader = Worker(environment(), near.prefix)
            try:
                _link(kv, reader, owner, OWNER_ID, "tcp", f"{far.address}:0")
                before = [cpu_seconds((worker.pid,)) for worker in (owner, reader)]
                taken = reader.call("pull", cluster_id=_HUB_ID, peer_id=OWNER_ID, kv=kv)
                used = [cpu_seconds((w.pid,)) - b for w, b in zip((owner, reader), before, strict=True)]
            finally:
                reader.close()
                owner.close()
    except Unavailable as exc:
        yield Line("pull over 10 MB/s", "tcp", target=at_most(0.5), note=str(exc))
        return
    workload = f"pull over 10 MB/s, {taken:.1f} s"
    for name, cpu_s in zip(("tcp, owner", "tcp, reader"), used, strict=True):
        yield Line(workload, name, "", cpu_s, "CPU s", at_most(0.5))


def dead(bench: Bench) -> Iterator[Line]:
    """V2: 200 pulls to a peer that was killed: each is refused at once, without dialling."""
    kv = Kv(2, 16, 8, 4 * KIB)
    owner = Worker(environment())
    reader = Side(READER_ID, "auto")
    try:
        told = owner.call("own", kv=vars(kv), backend="auto")
        memory = np.zeros((kv.tensors, kv.tensor_nbytes), np.uint8)
        cache = reader.register(kv, [int(tensor.ctypes.data) for tensor in memory])
        reader.link(OWNER_ID, told["address"])
        call = reader.pull(cache, OWNER_ID, kv)
        owner.kill()
        while _refusal(call) is not dd.NotLinkedError:
            time.sleep(0.01)
        begin, before = time.perf_counter(), cpu_seconds((ME,))
        refusals = {_refusal(call) for _ in range(200)}
        taken, used = time.perf_counter() - begin, cpu_seconds((ME,)) - before
    finally:
        reader.close()
        owner.close()
    if refusals != {dd.NotLinkedError}:
        raise RuntimeError(f"pulls to a dead peer ended with {refusals}")
    yield Line("200 pulls to a dead peer", "auto", "CPU of the process", used, "CPU s", at_most(0.2))
    yield Line("200 pulls to a dead peer", "auto", "all of them", taken * 1e3, "ms")


def _refusal(call: object) -> type[BaseException] | None:
    try:
        call()  # type: ignore[operator]
    except dd.LLMException as exc:
        return type(exc)
    return None


def _link(
    kv: dict[str, int], reader: Worker, owner: Worker, owner_id: int, backend: str = "auto",
    listen: str = "127.0.0.1:0",
) -> None:  # fmt: skip
    told = owner.call("own", kv=kv, backend=backend, cluster_id=owner_id, listen=listen)
    reader.call("own", kv=kv, backend=backend, cluster_id=_HUB_ID, listen="")
    reader.call("link", cluster_id=_HUB_ID, peer_id=owner_id, address=told["address"])
