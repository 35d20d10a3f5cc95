"""Rows C: many threads, many peers, and links that go while something runs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support import actors
from tests.support.pair import AT_ONCE, D_ID, P_ID, SUCCESS, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.slow import SlowPair, slow_pair
from tests.support.world import World, wait_until

BUSY = LLMStatusCode.LLM_LINK_BUSY
FAILED = LLMStatusCode.LLM_LINK_FAILED
MIB = 1 << 20


@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.rule("5.132", "5.134")
def test_c1_one_slow_peer_holds_up_nobody(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        other = pair.another("d")
        address = pair.listen(other, 3, "d")
        other.call(actors.blocks_cache, "src", seed=5, model_id=0)
        shape = Shape(tensors=1, dim0=60, stride=MIB)  # 6 s
        pair.source(shape=shape)
        pair.destination(shape=shape)
        pair.destination("small")
        blocks = list(range(60))
        running = pair.d.start(actors.pull_blocks, of_model(0), "dst", blocks, blocks)
        assert wait_until(lambda: bool(pair.d.call(actors.busy)))
        for step in _other_work(address):
            outcome = pair.d.attempt(*step)
            outcome.ok()
            assert outcome.took.within(AT_ONCE), step
            assert not running.done(), "the slow pull was over too early to show anything"
        pair.full_speed()
        running.result()
        pair.blocks_right(blocks, blocks)
        pieces = [([1024], [2048], 1024)]
        right = pair.d.call(actors.compare, "small", seed=5, src_tensor_nbytes=8192, pieces=pieces)
        assert not right, right


def _other_work(address: Any) -> list[tuple[Any, ...]]:
    return [
        (actors.link, [(3, address)]),
        (actors.pull_blocks, of_model(0, 3), "small", [1], [2]),
        (actors.blocks_cache, "more"),
        (actors.unregister, "more"),
        (actors.links,),
        (actors.check_link, 3),
        (actors.unlink, [3]),
    ]


# ---- C2 -------------------------------------------------------------------------------------------

ALLOWED = {
    "link": {"SUCCESS", "ALREADY_LINK", "LINK_FAILED", "TIMEOUT"},
    "unlink": {"SUCCESS", "UNLINK_FAILED", "LINK_BUSY", "TIMEOUT"},
    "force": {"SUCCESS", "UNLINK_FAILED"},
    "pull": {"SUCCESS", "NOT_YET_LINK", "LINK_FAILED", "KV_CACHE_NOT_EXIST", "WAIT_PROCESS_TIMEOUT"},
    "push": {"SUCCESS", "NOT_YET_LINK", "LINK_FAILED", "KV_CACHE_NOT_EXIST", "TIMEOUT"},
    "register": {"SUCCESS"},
    "check": {"SUCCESS", "NOT_YET_LINK", "LINK_FAILED", "TIMEOUT"},
    "links": {"SUCCESS"},
}


class _Mixed:
    """One process of C2: threads that do random things to the other two."""

    def __init__(self, w: World, others: dict[int, Any], mode: str, seed: int) -> None:
        self.w, self.others, self.mode = w, others, mode
        self.rng = random.Random(seed)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.longest = 0.0

    def one(self, thread: int) -> None:
        names = [name for name in ALLOWED if name != "push" or self.mode == "B"]
        what, peer = self.rng.choice(names), self.rng.choice(list(self.others))
        began = time.monotonic()
        try:
            code = getattr(self, what)(peer, thread)
        except LLMException as exc:
            code = exc.status_code
        self.longest = max(self.longest, time.monotonic() - began)
        self.counts[what, code.name.removeprefix("LLM_")] += 1

    def link(self, peer: int, thread: int) -> Any:
        return actors.link(self.w, [(peer, self.others[peer])], 2000)[0]

    def unlink(self, peer: int, thread: int) -> Any:
        return actors.unlink(self.w, [peer], 1000)[0]

    def force(self, peer: int, thread: int) -> Any:
        return actors.unlink(self.w, [peer], 1000, True)[0]

    def pull(self, peer: int, thread: int) -> Any:
        actors.pull_blocks(self.w, of_model(0, peer), f"dst{thread}", [1, 3], [2, 0])
        return SUCCESS

    def push(self, peer: int, thread: int) -> Any:
        actors.push_blocks(self.w, of_model(1, peer), "src", [1], [2])
        return SUCCESS

    def register(self, peer: int, thread: int) -> Any:
        held, manager = self.w.held[f"dst{thread}"], self.w.dist.cache_manager
        cache = manager.register_blocks_cache(held.desc, held.addresses)
        manager.unregister_cache(cache.cache_id)
        return SUCCESS

    def check(self, peer: int, thread: int) -> Any:
        self.w.dist.check_link_status(peer)
        return SUCCESS

    def links(self, peer: int, thread: int) -> Any:
        self.w.dist.links()
        return SUCCESS


def _mix(w: World, others: dict[int, Any], mode: str, seed: int, seconds: float) -> tuple[Any, float]:
    mixed = _Mixed(w, others, mode, seed)
    until = time.monotonic() + seconds

    def run(thread: int) -> None:
        while time.monotonic() < until:
            mixed.one(thread)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    return dict(mixed.counts), mixed.longest


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(30.0, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
@pytest.mark.rule("5.131")
def test_c2_mixed_use_of_three_processes(spawn: Spawner, pair_of_two: Pair, seconds: float) -> None:
    pair = pair_of_two
    mode, backend = pair.combo.mode, pair.combo.backend
    peers = {1: pair.p, 2: pair.d, 3: spawn()}
    addresses = {}
    for number, peer in peers.items():
        values = actors.options(mode, backend, "127.0.0.1:0", 2000)
        addresses[number] = peer.call(actors.up, number, values)
        peer.call(actors.blocks_cache, "src", seed=number, model_id=0)
        peer.call(actors.blocks_cache, "into", model_id=1)
        for thread in range(8):
            peer.call(actors.blocks_cache, f"dst{thread}")
    _warm(peers, addresses)
    before = {n: peer.call(actors.resources) for n, peer in peers.items()}
    running = [
        peer.start(_mix, {i: a for i, a in addresses.items() if i != n}, mode, n, seconds)
        for n, peer in peers.items()
    ]
    for one in running:
        mixed = one.outcome(seconds + 20)
        counts, longest = mixed.ok()
        assert Taken(longest, mixed.took.stalled).within(5.0)
        for what, code in counts:
            assert code in ALLOWED[what], counts
    for peer in peers.values():
        peer.call(actors.unlink, [1, 2, 3], 3000, True)
    for number, peer in peers.items():
        assert wait_until(lambda p=peer: p.call(actors.links) == [])  # type: ignore[misc]
        fits = wait_until(
            lambda n=number, p=peer: all(  # type: ignore[misc]
                a <= b for a, b in zip(p.call(actors.resources), before[n], strict=True)
            )
        )
        assert fits, (number, peer.call(actors.resources), before[number])
    pair.address = addresses[1]
    pair.link()
    pair.sources["src"] = (Shape(), 1)
    pair.d.call(actors.refill, "dst0", None)
    pair.pull_blocks([5], [6], name="dst0").ok()
    pair.blocks_right([5], [6], name="dst0")


def _warm(peers: dict[int, Any], addresses: dict[int, Any]) -> None:
    """Each reads from each once: threads that serve are started by the first use and stay."""
    for number, peer in peers.items():
        others = {i: a for i, a in addresses.items() if i != number}
        peer.call(actors.link, list(others.items()))
        for other in others:
            peer.call(actors.pull_blocks, of_model(0, other), "dst0", [1], [1])
    for peer in peers.values():
        peer.call(actors.unlink, list(addresses), 3000, True)


# ---- C3 -------------------------------------------------------------------------------------------


@pytest.mark.rule("5.131")
def test_c3_any_thread_may_use_what_another_made(pair: Pair) -> None:
    pair.up()
    shape = Shape(dim0=64)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    pair.d.call(_pull_from_many_threads)
    blocks = list(range(64))
    pair.blocks_right(blocks, blocks)


def _pull_from_many_threads(w: World) -> None:
    def pull(block: int) -> None:
        actors.pull_blocks(w, of_model(0), "dst", [block], [block])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(pull, range(62)))
    thread = threading.Thread(target=pull, args=(62,))
    thread.start()
    thread.join()

    async def from_a_loop() -> None:
        await asyncio.to_thread(pull, 63)

    asyncio.run(from_a_loop())


@pytest.mark.rule("3.6")
@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.parametrize("backend", ["auto", "tcp", "local", "shm"])
def test_c3_four_instances_in_one_process(spawn: Spawner, mode: str, backend: str) -> None:
    text = spawn().call(_four_instances, mode, backend)
    assert not text, text


def _four_instances(w: World, mode: str, backend: str) -> str:
    values = actors.options(mode, backend, "127.0.0.1:0", AllowMultipleInstances="1")
    dists = [dd.LLMDataDist(dd.LLMRole.MIX, n) for n in range(4)]
    w.extras |= {f"dist{n}": d for n, d in enumerate(dists)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda d: d.init(dict(values)), dists))
    for n, dist in enumerate(dists):
        later = [actors.cluster(m, dists[m].listen_address) for m in range(n + 1, 4)]
        if later and dist.link_clusters(later)[0] != SUCCESS:
            return f"{n} cannot link to {range(n + 1, 4)}"
    for n, dist in enumerate(dists):
        w.dist, w.arena = dist, None  # whose pool the memory is in, if it has one
        for name, seed in ((f"src{n}", n), (f"dst{n}", None)):
            actors.make(w, name, seed=seed)
            held = w.held[name]
            key = dd.BlocksCacheKey(0, 0) if seed is not None else None
            held.cache = dist.cache_manager.register_blocks_cache(held.desc, held.addresses, key)
    for n, dist in enumerate(dists):
        for m in set(range(4)) - {n}:
            dist.cache_manager.pull_blocks(of_model(0, m), w.held[f"dst{n}"].cache, [1], [2])
            pieces = [([1024], [2048], 1024)]
            text = actors.compare(w, f"dst{n}", seed=m, src_tensor_nbytes=8192, pieces=pieces)
            if text:
                return f"{n} from {m}: {text}"
    return ""


@pytest.mark.rule("3.5")
def test_c3_a_second_instance_needs_the_option(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    outcome = pair.d.attempt(_second_instance)
    outcome.expect(LLMStatusCode.LLM_FAILED, "llm.AllowMultipleInstances")
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


def _second_instance(w: World) -> None:
    w.extras["second"] = dd.LLMDataDist(dd.LLMRole.MIX, 77)
    w.extras["second"].init(actors.options())


# ---- C4 -------------------------------------------------------------------------------------------

SIX_SECONDS = Shape(tensors=1, dim0=60, stride=MIB)


@pytest.mark.rule("4.45", "4.46", "4.47")
@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("A", "patient"),
        ("B", "hasty"),
        ("A", "forced"),
        ("B", "forced"),
        pytest.param("A", "hasty", marks=pytest.mark.slow),
        pytest.param("B", "patient", marks=pytest.mark.slow),
    ],
)
def test_c4_unlinking_under_a_transfer(spawn: Spawner, mode: str, how: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        pair.source(shape=SIX_SECONDS)
        pair.destination(shape=SIX_SECONDS)
        running = pair.d.start(_pull_and_note_end, list(range(60)))
        assert wait_until(lambda: bool(pair.d.call(actors.busy)))
        actors.pause(0.2)  # in the middle
        {"patient": _patient, "hasty": _hasty, "forced": _forced}[how](pair, running)


def _pull_and_note_end(w: World, blocks: list[int]) -> tuple[LLMStatusCode, float]:
    try:
        actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
    except LLMException as exc:
        return exc.status_code, time.monotonic()
    return SUCCESS, time.monotonic()


def _patient(pair: SlowPair, running: Any) -> None:
    unlinking = pair.d.start(actors.unlink, [P_ID], 30_000)
    actors.pause(0.2)
    assert not unlinking.done()
    pair.full_speed()
    assert unlinking.result() == (SUCCESS, [SUCCESS])
    unlinked_at = time.monotonic()
    code, ended_at = running.result()
    assert code == SUCCESS and ended_at <= unlinked_at + running.outcome().took.stalled
    pair.blocks_right(list(range(60)), list(range(60)))
    assert wait_until(lambda: pair.p.call(actors.links) == [], AT_ONCE)


def _hasty(pair: SlowPair, running: Any) -> None:
    outcome = pair.d.attempt(actors.unlink, [P_ID], 300)
    assert outcome.value == (BUSY, [BUSY])
    assert outcome.elapsed >= 0.24 and outcome.took.within(0.46)
    pair.full_speed()
    assert running.result()[0] == SUCCESS
    pair.blocks_right(list(range(60)), list(range(60)))
    pair.d.call(actors.check_link, P_ID)
    assert [i for i, _, _ in pair.p.call(actors.links)] == [D_ID]


def _forced(pair: SlowPair, running: Any) -> None:
    watch = Stopwatch()
    outcome = pair.d.attempt(actors.unlink, [P_ID], 10_000, True)
    assert outcome.value == (SUCCESS, [SUCCESS])
    assert outcome.took.within(AT_ONCE)
    code, ended_at = running.result()
    assert code == FAILED
    assert watch.within(AT_ONCE, until=ended_at)
    first = pair.d.call(actors.digest, "dst")
    actors.pause(1.0)
    assert pair.d.call(actors.digest, "dst") == first
