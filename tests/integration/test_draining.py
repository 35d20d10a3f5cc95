"""drain: nothing new begins, what runs ends, then the engine is idle (issue "the whole interface")."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.stopping import stopped
from tests.support.world import World, wait_until

BUSY, GONE = LLMStatusCode.LLM_LINK_BUSY, LLMStatusCode.LLM_LINK_FAILED
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


def drain(w: World, timeout_ms: int) -> None:
    w.dist.drain(timeout_ms)


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.rule("5.7")
def test_new_transfers_are_refused_on_both_sides(pair: Pair) -> None:
    pair.up(d_listens=True)
    pair.source()
    pair.source("out", model_id=7)
    pair.destination()
    pair.p.call(actors.blocks_cache, "in")
    pair.d.call(actors.blocks_cache, "other", seed=4, model_id=4)
    pair.pull_blocks([0], [0]).ok()
    outcome = pair.p.attempt(drain, 2000)
    outcome.ok()
    assert outcome.took.within(0.5)
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([1], [2]).expect(BUSY, "draining", f"cluster {P_ID}")
    pair.unchanged()
    pair.p.attempt(actors.pull_blocks, of_model(4, D_ID), "in", [0], [0]).expect(BUSY, "draining")
    pair.p.attempt(_layers, D_ID).expect(LLMStatusCode.LLM_PARAM_INVALID if pair.combo.mode == "A" else BUSY)
    if pair.combo.mode == "B":
        pair.d.attempt(actors.push_blocks, of_model(7), "other", [0], [0]).expect(BUSY, "draining")
        pair.p.attempt(actors.push_blocks, of_model(4, D_ID), "out", [0], [0]).expect(BUSY, "draining")
    assert not pair.p.call(actors.untouched_source, "out", 11)


def _layers(w: World, cluster_id: int) -> Any:
    key = dd.BlocksCacheKey(cluster_id, 4)
    config = dd.TransferWithCacheKeyConfig(key, range(0, 1), range(0, 1))
    if not w.dist._engine.accessible:
        raise dd.ParamInvalidError("mode B only")
    return w.dist.cache_manager.transfer_cache_async(w.held["out"].cache, _Gate(), [config], [0], [1])


def test_what_is_registered_or_linked_later_is_not_announced(spawn: Spawner) -> None:
    pair = Pair(spawn(), spawn(), Combo("B", "auto")).up(link=False)
    pair.source()
    pair.destination()
    pair.p.call(drain, 1000)
    pair.link()
    pair.source("late", model_id=3)
    for model_id in (0, 3):
        pair.pull_blocks([1], [2], of_model(model_id)).expect(BUSY, "draining")
    pair.unchanged()


def test_finalize_and_a_new_life_follow(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    pair.p.call(drain, 1000)
    pair.p.call(drain, 1000)
    pair.p.call(actors.finalize)
    assert wait_until(lambda: pair.d.call(actors.links) == [])
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0")
    pair.address = pair.p.call(actors.up, P_ID, values)
    pair.source("again")
    pair.link()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2], "again")


# ---- what runs ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["A", "B"])
def test_a_running_pull_of_a_peer_ends_first(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        shape = Shape(tensors=1, dim0=4, stride=15_000_000)  # 6 s
        pair.source(shape=shape)
        pair.destination(shape=shape)
        blocks = list(range(4))
        pull = pair.d.start(actors.pull_blocks, of_model(0), "dst", blocks, blocks)
        assert wait_until(lambda: bool(pair.p.call(actors.busy)))
        too_short = pair.p.attempt(drain, 100)
        too_short.expect(BUSY, "not idle after 100 ms")
        assert too_short.took.about(0.1)
        assert not pull.done()
        pair.pull_blocks([0], [0]).expect(BUSY, "draining")
        assert not pull.done()
        pair.full_speed()
        pair.p.call(drain, 30_000)
        assert not pair.p.call(actors.busy)
        pull.result()
        pair.blocks_right(blocks, blocks)


def test_a_one_sided_pull_that_had_begun_ends_first(spawn: Spawner) -> None:
    """Mode B on one host: the owner sees nothing of a pull; its reader says when it is over."""
    pair = Pair(spawn(), spawn(), Combo("B", "local")).up(timeout_ms=20_000)
    shape = Shape(tensors=8, dim0=4, stride=16 << 20)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    blocks = list(range(4))
    loop = pair.d.start(_pull_until_refused, blocks)
    assert wait_until(lambda: bool(pair.d.call(actors.busy)))
    watch = Stopwatch()
    pair.p.call(drain, 10_000)
    drained_at = time.monotonic()
    pulls, last_end, code = loop.result()
    assert pulls > 0 and code == BUSY
    noted = 0.005 + watch.took().stalled
    assert last_end <= drained_at + noted, "the last good pull was over before drain returned"


def _pull_until_refused(w: World, blocks: list[int]) -> tuple[int, float, Any]:
    count, last = 0, 0.0
    while True:
        try:
            actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
        except dd.LLMException as exc:
            return count, last, exc.status_code
        count, last = count + 1, time.monotonic()


class _Gate(dd.LayerSynchronizer):
    def __init__(self) -> None:
        self.open = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        return layer_index == 0 or self.open.wait(30)


@pytest.mark.parametrize("drains", ["p", "d"])
def test_a_task_that_has_begun_goes_on(spawn: Spawner, drains: str) -> None:
    """P pushes two layers to D; one of them drains while the second is held."""
    pair = Pair(spawn(), spawn(), Combo("B", "auto")).up()
    pair.p.call(actors.blocks_cache, "out", seed=3, tensors=4)
    pair.d.call(actors.blocks_cache, "in", model_id=5, tensors=4)
    pair.p.call(_start_push, D_ID)
    assert wait_until(lambda: not pair.d.call(_block_is_fill))
    peer = pair.p if drains == "p" else pair.d
    draining = peer.start(drain, 10_000)
    assert wait_until(lambda: peer.call(_is_draining))
    pair.p.attempt(actors.push_blocks, of_model(5, D_ID), "out", [0], [0]).expect(BUSY)
    assert not draining.done(), "between two layers as well"
    assert pair.p.call(_end_push) == SUCCESS
    draining.result()
    pieces = [([0], [1024], 1024)]
    assert not pair.d.call(actors.compare, "in", seed=3, src_tensor_nbytes=8192, pieces=pieces)


def _start_push(w: World, cluster_id: int) -> None:
    gate = _Gate()
    config = dd.TransferWithCacheKeyConfig(dd.BlocksCacheKey(cluster_id, 5), range(0, 2), range(0, 2))
    manager = w.dist.cache_manager
    w.extras["gate"] = gate
    w.extras["task"] = manager.transfer_cache_async(w.held["out"].cache, gate, [config], [0], [1])


def _block_is_fill(w: World) -> bool:
    return bool((w.held["in"].tensor(1)[1024:2048] == 0xA5).all())


def _end_push(w: World) -> Any:
    w.extras.pop("gate").open.set()
    return w.extras.pop("task").synchronize(5000)


# ---- peers that cannot answer ---------------------------------------------------------------------------


def test_a_stopped_peer_costs_no_more_than_the_time(spawn: Spawner) -> None:
    pair = Pair(spawn(), spawn(), Combo("B", "auto")).up()
    with stopped(pair.d.pid):
        outcome = pair.p.attempt(drain, 500)
    outcome.expect(BUSY, f"cluster {D_ID}")
    assert outcome.took.about(0.5)
    pair.p.call(drain, 2000)


def test_a_peer_that_dies_meanwhile_is_not_waited_for(spawn: Spawner) -> None:
    pair = Pair(spawn(), spawn(), Combo("B", "auto")).up()
    pair.d.stop()
    waiting = pair.p.start(drain, 20_000)
    assert wait_until(lambda: pair.p.call(_is_draining))
    pair.d.kill()
    outcome = waiting.outcome()
    outcome.ok()
    assert outcome.took.within(5.0)


def _is_draining(w: World) -> bool:
    return bool(w.dist._engine._state.draining)


def test_finalize_ends_a_drain(spawn: Spawner) -> None:
    pair = Pair(spawn(), spawn(), Combo("B", "auto")).up()
    with stopped(pair.d.pid):
        waiting = pair.p.start(drain, 30_000)
        assert wait_until(lambda: pair.p.call(_is_draining))
        pair.p.call(actors.finalize)
        waiting.result(5.0)


# ---- signals --------------------------------------------------------------------------------------------


def test_a_signal_handler_drains_while_other_threads_pull(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    pulling = pair.d.start(_pull_until_refused, [0, 1, 2])
    waiting = pair.d.start(_drain_on_sigterm, 5000, on_main=True)
    assert wait_until(lambda: pair.d.call(_has_handler))
    os.kill(pair.d.pid, signal.SIGTERM)
    assert waiting.result() == "idle"
    _, _, code = pulling.result()
    assert code == BUSY


def test_a_handler_that_interrupts_a_pull_of_its_own_thread_does_not_wait_for_it(spawn: Spawner) -> None:
    with slow_pair(spawn, "A") as pair:
        pair.up_slow()
        shape = Shape(tensors=1, dim0=4, stride=15_000_000)  # 6 s
        pair.source(shape=shape)
        pair.destination(shape=shape)
        pulling = pair.d.start(_pull_with_handler, [0, 1, 2, 3], on_main=True)
        assert wait_until(lambda: pair.d.call(_has_handler) and bool(pair.d.call(actors.busy)))
        os.kill(pair.d.pid, signal.SIGTERM)
        assert wait_until(lambda: pair.d.call(_said) is not None)
        assert pair.d.call(_said) == "idle"
        assert pair.d.call(_left), "the pull was under way"
        pair.full_speed()
        pulling.result()
        pair.blocks_right([0, 1, 2, 3], [0, 1, 2, 3])


def _handler(w: World, timeout_ms: int, ended: threading.Event) -> Any:
    def handle(number: int, frame: Any) -> None:
        try:
            w.dist.drain(timeout_ms)
            w.extras["left"] = actors.busy(w)
            w.extras["said"] = "idle"
        except Exception as exc:
            w.extras["said"] = repr(exc)
        ended.set()

    return signal.signal(signal.SIGTERM, handle)


def _drain_on_sigterm(w: World, timeout_ms: int) -> str:
    ended = threading.Event()
    old = _handler(w, timeout_ms, ended)
    w.extras["handler"] = True
    try:
        while not ended.wait(0.05):
            pass
        return str(w.extras["said"])
    finally:
        signal.signal(signal.SIGTERM, old)


def _pull_with_handler(w: World, blocks: list[int]) -> None:
    old = _handler(w, 5000, threading.Event())
    w.extras["handler"] = True
    try:
        actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
    finally:
        signal.signal(signal.SIGTERM, old)


def _has_handler(w: World) -> bool:
    return bool(w.extras.get("handler"))


def _said(w: World) -> Any:
    return w.extras.get("said")


def _left(w: World) -> int:
    return int(w.extras["left"])
