"""Pulls of one block again and again, between real processes, while what they rely on changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from tests.support import actors
from tests.support.pair import P_ID, SUCCESS, Pair, Shape, of_model
from tests.support.world import World

GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
THREADS = 32
SHAPE = Shape(tensors=3, dim0=THREADS, stride=1000)
DOWN = {"LLM_LINK_FAILED", "LLM_NOT_YET_LINK"}


@pytest.fixture(params=["local", "shm", "tcp"])
def warm(pair_of: Callable[[str, str], Pair], request: pytest.FixtureRequest) -> Pair:
    """Linked, the short way counted, and taken once already."""
    pair = pair_of("B", request.param)
    pair.up(timeout_ms=20_000)  # many threads beside other work
    pair.d.call(_count)
    pair.source(shape=SHAPE)
    pair.destination(shape=SHAPE)
    pair.d.call(_pull_until_short)
    return pair


def _count(w: World) -> None:
    inside: Any = w.dist._engine
    pull_again, counted = inside.pull_again, []

    def observed(*arguments: Any) -> bool:
        done: bool = pull_again(*arguments)
        if done:
            counted.append(1)
        return done

    inside.pull_again = observed
    w.extras["short"] = counted


def _pull_until_short(w: World, model_id: int = 0) -> None:
    """Two pulls, or a few more as long as the table of the peer has not come in."""
    before = len(w.extras["short"])
    for _ in range(1000):
        actors.pull_blocks(w, of_model(model_id), "dst", [1], [1])
        if len(w.extras["short"]) > before:
            actors.refill(w, "dst", None)
            return
    raise AssertionError("the short way is never taken")


def _taken(w: World) -> int:
    return len(w.extras["short"])


def test_the_bytes_are_right(warm: Pair) -> None:
    for src, dst in ((3, 5), (5, 3), (0, 31), (31, 0), (7, 7)):
        warm.pull_blocks([src], [dst]).ok()
    warm.blocks_right([3, 5, 0, 31, 7], [5, 3, 31, 0, 7])
    assert warm.d.call(_taken) == 6


@pytest.mark.rule("5.12", "6.33")
def test_s1_a_cache_withdrawn_after_many_pulls_is_not_read(warm: Pair) -> None:
    """200 rounds, each along a route that is in use."""
    for seed in range(200):
        warm.source("gone", SHAPE, seed=seed, model_id=1)
        warm.d.call(_pull_until_short, 1)
        warm.p.call(actors.unregister, "gone")
        warm.pull_blocks([0], [0], of_model(1)).expect(GONE)
        warm.p.call(actors.unmap, "gone")
        warm.unchanged()
    warm.pull_blocks([1], [2]).ok()
    warm.blocks_right([1], [2])


@pytest.mark.rule("5.14", "6.33")
def test_s2_a_block_is_of_one_generation(warm: Pair) -> None:
    """The key comes back with other bytes all the time; the block is torn by no pull."""
    warm.p.call(actors.make, "churn", tensors=3, dim0=4, stride=4096)
    warm.destination("into", Shape(tensors=3, dim0=4, stride=4096))
    pulling = warm.d.start(_pull_uniform, "into")
    generations = warm.p.call(_churn, "churn", 300)
    warm.d.call(actors.raise_flag, "enough")
    good, failed = pulling.result()
    assert failed <= {GONE.name}, failed
    assert good >= 10
    assert generations == 300


def _churn(w: World, name: str, rounds: int) -> int:
    held = w.held[name]
    for generation in range(rounds):
        for t in range(held.tensors):
            held.tensor(t)[:] = generation % 251
        actors.blocks_cache(w, name, model_id=2)
        actors.pause(0.003)
        actors.unregister(w, name)
    return rounds


def _pull_uniform(w: World, name: str) -> tuple[int, set[str]]:
    """How many pulls brought a block, all bytes of which were equal; and the codes of the others."""
    held, good, failed = w.held[name], 0, set()
    while not w.extras.get("enough"):
        try:
            actors.pull_blocks(w, of_model(2), name, [1], [2])
        except LLMException as exc:
            failed.add(exc.status_code.name)
            continue
        good += 1
        seen = {
            int(x) for t in range(held.tensors) for x in set(held.tensor(t)[2 * 4096 : 3 * 4096].tolist())
        }
        assert len(seen) == 1, f"a block of the generations {seen}"
    return good, failed


def test_c_many_threads_pull_one_block_each(warm: Pair) -> None:
    before = warm.d.call(_taken)
    warm.d.call(_pull_in_threads, 50)
    warm.blocks_right(range(THREADS), list(reversed(range(THREADS))))
    taken = warm.d.call(_taken) - before
    if (
        warm.combo.backend == "tcp"
    ):  # a thread that finds no idle connection goes the plain way, which gets one
        assert taken > THREADS
    elif (
        warm.combo.backend != "nixl"
    ):  # nixl goes the plain way for a second after a transfer that took 50 ms
        assert taken == 50 * THREADS


def _pull_in_threads(w: World, turns: int) -> None:
    start = threading.Barrier(THREADS)

    def work(block: int) -> None:
        start.wait()
        for _ in range(turns):
            actors.pull_blocks(w, of_model(0), "dst", [block], [THREADS - 1 - block])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_unlinking_with_force_in_the_middle(warm: Pair) -> None:
    """Every round ends with one of the two codes, nothing hangs, and the next link is as good."""
    for _ in range(15):
        results = warm.d.call(_unlink_meanwhile)
        assert set(results) <= DOWN, results
        warm.link()
        warm.d.call(_pull_until_short)
    warm.pull_blocks([4], [6]).ok()
    warm.blocks_right([4], [6])


def _unlink_meanwhile(w: World) -> list[str]:
    """What pulls of four threads end with when the link is taken away."""
    going, results = threading.Barrier(5), []

    def work(block: int) -> None:
        actors.pull_blocks(w, of_model(0), "dst", [block], [block])
        going.wait()
        try:
            while True:
                actors.pull_blocks(w, of_model(0), "dst", [block], [block])
        except LLMException as exc:
            results.append(exc.status_code.name)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    going.wait()
    code, codes = actors.unlink(w, [P_ID], force=True)
    assert (code, codes) == (SUCCESS, [SUCCESS])
    for thread in threads:
        thread.join()
    return results


def test_unregistering_the_destination_in_the_middle(warm: Pair) -> None:
    """When it returns nothing is written there any more."""
    for _ in range(20):
        warm.destination("brief", SHAPE)
        assert warm.d.call(_unregister_meanwhile, "brief") == GONE.name


def _unregister_meanwhile(w: World, name: str) -> str:
    going, ended = threading.Event(), []
    manager, cache = w.dist.cache_manager, w.held[name].cache

    def work() -> None:
        try:
            while True:
                manager.pull_blocks(BlocksCacheKey(P_ID, 0), cache, [2], [3])
                going.set()
        except LLMException as exc:
            ended.append(exc.status_code.name)

    thread = threading.Thread(target=work)
    thread.start()
    going.wait()
    actors.unregister(w, name)
    actors.refill(w, name, None)
    thread.join()
    text = actors.unchanged(w, name)
    assert not text, text
    return str(ended[0])


def test_f_a_forked_child_is_refused_and_does_not_disturb(warm: Pair) -> None:
    assert warm.d.call(_pull_in_child) == 7
    warm.pull_blocks([4], [6]).ok()
    warm.blocks_right([4], [6])


def _pull_in_child(w: World) -> int:
    """The child's exit code: 7 when its pull was refused."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            actors.pull_blocks(w, of_model(0), "dst", [0], [0])
        except RuntimeError:
            code = 7
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_t3_an_owner_that_dies_in_the_middle(warm: Pair) -> None:
    pulling = warm.d.start(_pull_until_error)
    warm.p.kill()
    assert pulling.result() in DOWN


def _pull_until_error(w: World) -> str:
    try:
        while True:
            actors.pull_blocks(w, of_model(0), "dst", [1], [2])
    except LLMException as exc:
        return exc.status_code.name
