"""Rows A: layer-wise pushes, from P into D."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.memory import pattern
from tests.support.pair import D_ID, SEED, SUCCESS, Pair, Shape, by_id, of_model
from tests.support.pool import Spawner
from tests.support.which_combos import SHM_LATER
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = LLMStatusCode.LLM_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
GONE_LINK = (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)
FOUR = Shape(tensors=8, dim0=4, stride=512)


class Synchronizer(dd.LayerSynchronizer):
    """Notes its calls; holds, fails or raises at one layer."""

    def __init__(self, hold: int | None = None, fail: int | None = None, error: int | None = None) -> None:
        self.calls: list[int] = []
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._hold, self._fail, self._error = hold, fail, error

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.calls.append(layer_index)
        if layer_index == self._hold:
            self.reached.set()
            self.go_on.wait(20)
        if layer_index == self._error:
            raise ValueError("x")
        return layer_index != self._fail


class Target:
    """One destination of a task, said for either mode."""

    def __init__(
        self, pair: Pair, src: range, dst: range, name: str = "dst", d: Any = None, d_id: int = D_ID
    ):
        if pair.combo.mode == "A":
            addresses = (d or pair.d).call(_addresses, name)[2 * dst.start : 2 * dst.stop]
            self.config: Any = dd.TransferConfig(d_id, addresses, src, 0)
        else:
            self.config = dd.TransferWithCacheKeyConfig(of_model(0, d_id), src, dst, 0)


def _addresses(w: World, name: str) -> list[int]:
    return w.held[name].addresses


def _start(
    w: World, configs: list[Any], sync: dict[str, Any], src: Any, dst: Any, nbytes: int | None
) -> None:
    synchronizer = Synchronizer(**sync)
    manager = w.dist.cache_manager
    task = manager.transfer_cache_async(w.held["src"].cache, synchronizer, configs, src, dst, nbytes)
    w.extras |= {"task": task, "sync": synchronizer}


def _finish(w: World, timeout: int | None = 20_000) -> tuple[Any, list[Any], list[int]]:
    task, synchronizer = w.extras["task"], w.extras["sync"]
    return task.synchronize(timeout), task.get_results(timeout), synchronizer.calls


def _run(w: World, configs: list[Any], sync: dict[str, Any], src: Any, dst: Any, nbytes: int | None) -> Any:
    _start(w, configs, sync, src, dst, nbytes)
    return _finish(w)


def _run_one(pair: Pair, src: range, dst: range, blocks: Any = ([1, 2], [3, 0]), **more: Any) -> Any:
    sync = more.get("sync", {})
    nbytes = more.get("nbytes", FOUR.stride if pair.combo.mode == "A" else None)
    return pair.p.attempt(_run, [Target(pair, src, dst).config], sync, *blocks, nbytes)


def _layers(dst: range, src: range) -> list[tuple[int, int]]:
    return [(2 * d + k, 2 * s + k) for d, s in zip(dst, src, strict=True) for k in (0, 1)]


def _ready(pair: Pair, **options: Any) -> Pair:
    pair.up(**options)
    pair.source(shape=FOUR)
    pair.destination(shape=FOUR, model_id=0)
    return pair


@pytest.mark.rule("5.108", "5.121")
@SHM_LATER
def test_a1_a_layer_counts_as_sent_when_it_is_there(pair: Pair) -> None:
    _ready(pair, timeout_ms=1000)
    target = Target(pair, range(0, 4), range(0, 4))
    pair.p.call(_start, [target.config], {"hold": 2}, [1, 2], [3, 0], FOUR.stride)
    pair.p.call(_write_while_held, 2, 77, 2.0)
    overall, results, calls = pair.p.call(_finish)
    late = [(4, 4), (5, 5)]
    held = pair.d.call(_tensor_blocks, "dst", [4, 5], FOUR.stride, [3, 0])
    want = [pattern(77, t, FOUR.tensor_nbytes).reshape(-1, FOUR.stride)[[1, 2]].tobytes() for t, _ in late]
    assert (overall, results, calls) == (SUCCESS, [SUCCESS], [0, 1, 2, 3])
    assert held == want


def _write_while_held(w: World, layer: int, seed: int, seconds: float) -> None:
    assert w.extras["sync"].reached.wait(10)
    held = w.held["src"]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for t in (2 * layer, 2 * layer + 1):
            held.tensor(t)[:] = 0
            held.tensor(t)[:] = pattern(seed, t, held.tensor_nbytes)
    w.extras["sync"].go_on.set()


def _tensor_blocks(w: World, name: str, tensors: list[int], stride: int, blocks: list[int]) -> list[bytes]:
    held = w.held[name]
    return [held.tensor(t).reshape(-1, stride)[blocks].tobytes() for t in tensors]


@pytest.mark.rule("5.111", "5.112")
@SHM_LATER
def test_a2_one_failing_peer_does_not_hide_the_others(spawn: Spawner, pair: Pair) -> None:
    _ready(pair)
    mode, backend = pair.combo.mode, pair.combo.backend
    dead, third = spawn(), spawn()
    for peer, cluster_id in ((dead, 3), (third, 4)):
        address = peer.call(actors.up, cluster_id, actors.options(mode, backend, "127.0.0.1:0"))
        assert pair.p.call(actors.link, [(cluster_id, address)])[0] == SUCCESS
        peer.call(actors.blocks_cache, "dst", model_id=0, **FOUR.memory())
    peers = [(pair.d, D_ID), (dead, 3), (third, 4)]
    targets = [Target(pair, range(4), range(4), d=peer, d_id=i).config for peer, i in peers]
    dead.kill()
    overall, results, _ = pair.p.call(_run, targets, {}, [1, 2], [3, 0], FOUR.stride)
    assert results[0] == SUCCESS and results[2] == SUCCESS
    assert results[1] in GONE_LINK
    assert overall == results[1]
    pair.blocks_right([1, 2], [3, 0])
    pair.blocks_right([1, 2], [3, 0], peer=third)


@pytest.mark.rule("5.84", "5.113", "5.114")
def test_a3_asking_early_gives_no_final_answer(pair: Pair) -> None:
    _ready(pair)
    target = Target(pair, range(0, 4), range(0, 4))
    pair.p.call(_start, [target.config], {"hold": 1}, [1, 2], [3, 0], FOUR.stride)
    early = pair.p.call(_ask_early)
    assert early[0] == TIMEOUT
    assert all(entry in (None, TIMEOUT) for entry in early[1])
    pair.p.call(_let_go)
    first = pair.p.call(_finish)
    assert first[:2] == (SUCCESS, [SUCCESS])
    for timeout in (0, None, 10):
        assert pair.p.call(_finish, timeout) == first
    pair.blocks_right([1, 2], [3, 0])


def _ask_early(w: World) -> tuple[Any, list[Any]]:
    assert w.extras["sync"].reached.wait(10)
    return w.extras["task"].synchronize(0), w.extras["task"].get_results(0)


def _let_go(w: World) -> None:
    w.extras["sync"].go_on.set()


def test_a3_a_dropped_task_completes_all_the_same(pair: Pair) -> None:
    _ready(pair)
    target = Target(pair, range(0, 4), range(0, 4))
    pair.p.call(_start_and_drop, [target.config], [1, 2], [3, 0], FOUR.stride)
    assert pair.d.call(_arrives, FOUR.stride)
    pair.blocks_right([1, 2], [3, 0])


def _start_and_drop(w: World, *args: Any) -> None:
    _start(w, args[0], {}, *args[1:])
    del w.extras["task"]


def _arrives(w: World, stride: int, tensor: int = 7) -> bool:
    """Whether the last block of a tensor becomes right in time."""
    want = pattern(SEED, tensor, FOUR.tensor_nbytes).reshape(-1, stride)[2].tobytes()
    blocks = w.held["dst"].tensor(tensor).reshape(-1, stride)
    return actors.wait_until(lambda: blocks[0].tobytes() == want, 5.0)


@pytest.mark.parametrize(("sync", "code"), [({"fail": 1}, INVALID), ({"error": 1}, FAILED)], ids=str)
@pytest.mark.rule("5.109", "5.110")
@SHM_LATER
def test_a4_a_synchronizer_that_fails(pair: Pair, sync: dict[str, int], code: LLMStatusCode) -> None:
    _ready(pair)
    target = Target(pair, range(0, 3), range(0, 3))
    overall, results, calls = pair.p.call(_run, [target.config], sync, [1, 2], [3, 0], FOUR.stride)
    assert (overall, results, calls) == (code, [code], [0, 1])
    if "error" in sync:
        assert pair.p.call(_cause_of_task) == "ValueError('x')"
    pair.blocks_right([1, 2], [3, 0], tensors=[(0, 0), (1, 1)])
    actors.pause(0.5)
    pair.blocks_right([1, 2], [3, 0], tensors=[(0, 0), (1, 1)])


def _cause_of_task(w: World) -> str:
    error = w.extras["task"].exception()
    return repr(error.__cause__)


@pytest.mark.rule("5.87", "5.90", "5.94")
def test_a5_layers_correspond_by_position(pair: Pair) -> None:
    _ready(pair)
    overall, results, calls = _run_one(pair, range(1, 2), range(0, 1)).ok()
    assert (overall, results, calls) == (SUCCESS, [SUCCESS], [1])
    pair.blocks_right([1, 2], [3, 0], tensors=_layers(range(0, 1), range(1, 2)))


@pytest.mark.parametrize("nbytes", [None, 0, FOUR.stride])
@pytest.mark.rule("5.103")
def test_a5_none_and_zero_mean_the_sources_block_bytes(pair: Pair, nbytes: int | None) -> None:
    _ready(pair)
    assert _run_one(pair, range(0, 4), range(0, 4), nbytes=nbytes).ok()[0] == SUCCESS
    pair.blocks_right([1, 2], [3, 0])


def _refused(outcome: Any) -> bool:
    """Refused with LLM_PARAM_INVALID, by the call itself or as the result of the config."""
    return outcome.code == INVALID or (outcome.error is None and outcome.value[0] == INVALID)


@pytest.mark.rule("5.105")
def test_a5_a_wrong_block_size_is_refused(pair_b: Pair) -> None:
    _ready(pair_b)
    assert _refused(_run_one(pair_b, range(0, 4), range(0, 4), nbytes=FOUR.stride // 2))
    pair_b.unchanged()


def test_a5_a_block_size_beyond_the_source_is_refused_for_raw_addresses(pair_a: Pair) -> None:
    _ready(pair_a)
    assert _refused(_run_one(pair_a, range(0, 4), range(0, 4), nbytes=FOUR.tensor_nbytes))
    pair_a.unchanged()


@pytest.mark.parametrize("nbytes", [None, 0])
@pytest.mark.rule("5.99")
def test_a5_slot_to_blocks_needs_the_block_size(pair: Pair, nbytes: int | None) -> None:
    _ready(pair)
    assert _refused(_run_one(pair, range(0, 4), range(0, 4), blocks=(None, [3, 0]), nbytes=nbytes))
    pair.unchanged()


@pytest.mark.rule("5.104", "5.105")
def test_a_slot_goes_into_blocks_in_pieces(pair: Pair) -> None:
    pair.up()
    pair.slots("src", Shape(tensors=8, dim0=2, stride=28))
    pair.destination(shape=Shape(tensors=8, dim0=9, stride=8), model_id=0)
    assert _run_one(pair, range(4), range(4), blocks=(None, [1, 3, 5, 7]), nbytes=8).ok()[0] == SUCCESS
    pair.right([([0, 8, 16], [8, 24, 40], 8), ([24], [56], 4)])


@pytest.mark.rule("5.101")
def test_a_slot_goes_to_a_slot(pair: Pair) -> None:
    pair.up()
    shape = Shape(tensors=8, dim0=3, stride=64)
    pair.slots("src", shape)
    cache_id = pair.slot_destination(shape=shape)
    if pair.combo.mode == "A":
        addresses = [a + 2 * 64 for a in pair.d.call(_addresses, "dst")]
        config: Any = dd.TransferConfig(D_ID, addresses, range(0, 4), 1)
    else:
        config = dd.TransferWithCacheKeyConfig(by_id(cache_id, 2, D_ID), range(0, 4), range(0, 4), 1)
    assert pair.p.call(_run, [config], {}, None, None, None)[0] == SUCCESS
    pair.right([([64], [128], 64)])


@pytest.mark.rule("5.84", "5.85")
def test_each_mode_takes_its_own_kind_of_config(pair: Pair) -> None:
    _ready(pair)
    keyed = dd.TransferWithCacheKeyConfig(of_model(0, D_ID), range(4), range(4))
    raw = dd.TransferConfig(D_ID, [4096] * 8, range(4))
    wrong = keyed if pair.combo.mode == "A" else raw
    assert type(pair.p.attempt(_run, [wrong], {}, [1], [2], None).error) is TypeError
    pair.unchanged()


@pytest.mark.rule("5.86")
def test_a_host_source_is_refused(pair: Pair) -> None:
    pair.up()
    pair.source(shape=FOUR, placement="HOST", accessible=True)
    pair.destination(shape=FOUR, model_id=0)
    assert _run_one(pair, range(0, 4), range(0, 4)).expect(INVALID)
    pair.unchanged()


@pytest.mark.rule("5.116")
def test_a_cancelled_task(pair: Pair) -> None:
    _ready(pair)
    target = Target(pair, range(0, 4), range(0, 4))
    pair.p.call(_start, [target.config], {"hold": 1}, [1, 2], [3, 0], FOUR.stride)
    assert pair.d.call(_arrives, FOUR.stride, 1)
    pair.p.call(_cancel_while_held)
    overall, results, calls = pair.p.call(_finish)
    assert (overall, results) == (FAILED, [FAILED])
    assert 2 not in calls
    assert pair.p.call(_cancelled)
    pair.blocks_right([1, 2], [3, 0], tensors=[(0, 0), (1, 1)])


def _cancel_while_held(w: World) -> None:
    assert w.extras["sync"].reached.wait(10)
    w.extras["task"].cancel()
    w.extras["sync"].go_on.set()


def _cancelled(w: World) -> bool:
    return isinstance(w.extras["task"].exception(), CancelledError)
