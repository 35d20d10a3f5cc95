"""How a process ends: by itself, by Ctrl-C, by a kill in the middle of something."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.pair import AT_ONCE, D_ID, SUCCESS, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.which_combos import SHM_LATER
from tests.support.world import World

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
FORGETS = """
import threading, sys
import llm_datadist as dd
from tests.support import actors
from tests.support.world import World
w = World()
actors.up(w, 2, actors.options("B"))
actors.blocks_cache(w, "dst")
actors.link(w, [(1, ("127.0.0.1", int(sys.argv[1])))])
actors.pull_blocks(w, dd.BlocksCacheKey(1, 0), "dst", [1], [2])
print("pulled", flush=True)
"""


@pytest.mark.rule("3.15")
def test_a_script_that_forgets_finalize_ends_by_itself(pair: Pair) -> None:
    mode, backend = pair.combo.mode, pair.combo.backend
    pair.up(link=False)
    pair.source()
    script = FORGETS.replace('actors.options("B")', f'actors.options("{mode}", "{backend}")')
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "error", "-c", script, str(pair.address[1])]
    watch = Stopwatch()
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pulled\n"
    assert not done.stderr
    assert watch.within(10)
    assert actors.wait_until(lambda: pair.p.call(actors.links) == [])


@pytest.mark.parametrize("mode", ["A", "B"])
def test_ctrl_c_in_a_pull_over_a_slow_link(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        _interrupt_a_pull(pair, Shape(tensors=1, dim0=64, stride=MIB), 0.5, True)


@SHM_LATER
def test_ctrl_c_in_a_pull_on_one_host(pair: Pair) -> None:
    pair.up(timeout_ms=30_000)
    _interrupt_a_pull(pair, Shape(tensors=8, dim0=16, stride=MIB), 0.03, False)


def _interrupt_a_pull(pair: Pair, shape: Shape, after: float, certain: bool) -> None:
    pair.p.call(actors.blocks_cache, "src", model_id=0, **shape.memory())
    pair.source("other", model_id=1)
    pair.destination(shape=shape)
    pair.destination("small")
    running = pair.d.start(_pull_until_interrupted, list(range(shape.dim0)), certain, on_main=True)
    assert pair.d.call(_has_begun)
    actors.pause(after)
    watch = Stopwatch()
    pair.d.interrupt()
    ended_at, first, later = running.result()
    assert watch.within(1.0, until=ended_at)
    assert first == later
    pair.pull_blocks([1], [2], of_model(1), "small").ok()
    pair.blocks_right([1], [2], source="other", name="small")


def _has_begun(w: World) -> bool:
    return actors.wait_until(lambda: "begun" in w.extras)


def _pull_until_interrupted(w: World, blocks: list[int], once: bool) -> tuple[float, str, str]:
    w.extras["begun"] = True
    try:
        while True:
            actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
            assert not once, "the pull was over before the interrupt"
    except KeyboardInterrupt:
        ended_at = time.monotonic()
    first = actors.digest(w, "dst")
    actors.pause(0.5)
    return ended_at, first, actors.digest(w, "dst")


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_decode_dies_in_the_middle_of_a_push(spawn: Spawner, pair_b: Pair, rounds: int) -> None:
    pair = pair_b.up(timeout_ms=30_000)
    shape = Shape(tensors=8, dim0=16, stride=MIB)
    pair.p.call(actors.blocks_cache, "src", model_id=0, **shape.memory())
    for number in range(rounds):
        pair.d.call(actors.blocks_cache, "dst", model_id=0, **shape.memory())
        blocks = list(range(shape.dim0))
        running = pair.p.start(_push_again_and_again, blocks)
        actors.pause(0.05)
        watch = Stopwatch()
        pair.d.kill()
        code, ended_at = running.result()
        assert code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)
        assert watch.within(AT_ONCE, until=ended_at)
        pair.d = spawn()
        pair.d.call(actors.up, D_ID, actors.options("B", pair.combo.backend, None, 30_000))
        pair.link()
        small = f"small{number}"
        pair.source(small, model_id=number + 1)
        pair.destination(small, model_id=0)
        pair.p.call(actors.push_blocks, of_model(0, D_ID), small, [1], [2])
        pair.blocks_right([1], [2], source=small, name=small)


def _push_again_and_again(w: World, blocks: list[int]) -> tuple[Any, float]:
    try:
        while True:
            actors.push_blocks(w, of_model(0, D_ID), "src", blocks, blocks)
    except LLMException as exc:
        return exc.status_code, time.monotonic()


@pytest.mark.rule("3.9", "3.10")
def test_finalize_ends_within_two_seconds_with_work_queued(pair: Pair) -> None:
    pair.up(timeout_ms=30_000, HeartbeatIntervalMs="20000")
    pair.source()
    pair.destination()
    pair.p.stop()
    waiting = [pair.d.start(actors.pull_blocks, of_model(0), "dst", [1], [2]) for _ in range(4)]
    actors.pause(0.2)
    outcome = pair.d.attempt(actors.finalize)
    pair.p.cont()
    outcome.ok()
    assert outcome.took.within(2.0)
    for one in waiting:
        end = one.outcome()
        if pair.combo.mode == "A":
            end.expect(LLMStatusCode.LLM_ENGINE_FINALIZED)
        else:  # the memory of a stopped process may be readable
            assert end.code in (SUCCESS, LLMStatusCode.LLM_ENGINE_FINALIZED)


@pytest.mark.rule("3.8")
def test_finalize_tells_the_peers(pair: Pair) -> None:
    pair.up()
    pair.d.call(actors.finalize)
    assert actors.wait_until(lambda: pair.p.call(actors.links) == [], AT_ONCE)
