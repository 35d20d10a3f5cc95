"""Rows B: block lists and sizes, every byte of the destination compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.pair import D_ID, P_ID, SEED, SUCCESS, Pair, Shape, by_id, by_request, of_model
from tests.support.peers import Outcome

INVALID = LLMStatusCode.LLM_PARAM_INVALID

# (source blocks, destination blocks, what happens): row B1 with P of 113 blocks and D of 211.
BAD_LISTS: list[tuple[Any, Any, Any]] = [
    ([113], [0], INVALID),
    ([0], [211], INVALID),
    ([2**63], [0], INVALID),
    ([0], [2**63], INVALID),
    ([0, 1], [0], INVALID),
    ([0], [0, 1], INVALID),
    ([0, 1], [3, 3], INVALID),
    ([-1], [0], ValueError),
    ([2**64], [0], ValueError),
    ([0], [-1], ValueError),
    ([0], [2**64], ValueError),
    ([True], [0], TypeError),
    ([1.0], [0], TypeError),
    (["1"], [0], TypeError),
    ([0], [True], TypeError),
    ([0], [1.0], TypeError),
    ([0], ["1"], TypeError),
    (np.array([0.0]), [0], TypeError),
    (np.array([-1]), [0], ValueError),
    (np.array([[0]]), [0], TypeError),
]


def _hold(outcome: Outcome, expected: Any, given: Any) -> None:
    if isinstance(expected, LLMStatusCode):
        assert outcome.code == expected, (given, outcome)
    else:
        assert type(outcome.error) is expected, (given, outcome)


@pytest.mark.rule("5.31", "5.55", "5.57", "5.63", "5.64", "5.66")
def test_b1_every_index_of_a_pull_is_checked(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(dim0=113, stride=64))
    pair.destination(shape=Shape(dim0=211, stride=64))
    for src, dst, expected in BAD_LISTS:
        _hold(pair.pull_blocks(src, dst), expected, (src, dst))
        pair.unchanged()
    actors.pause(0.5)  # the second look of "unchanged": late writes would come within this time
    pair.unchanged()
    pair.pull_blocks([112], [0]).ok()
    pair.pull_blocks([np.int64(112)], [1]).ok()
    pair.pull_blocks(np.array([112], np.int32), np.array([2], np.uint8)).ok()
    pair.pull_blocks([0], [210]).ok()
    pair.blocks_right([112, 112, 112, 0], [0, 1, 2, 210])


@pytest.mark.rule("5.31", "5.64", "5.66", "5.81")
def test_b1_every_index_of_a_push_is_checked(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source(shape=Shape(dim0=113, stride=64))
    pair.destination(shape=Shape(dim0=211, stride=64), model_id=0)

    def push(src: Any, dst: Any) -> Outcome:
        return pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", src, dst)

    for src, dst, expected in [*BAD_LISTS, ([], [], INVALID), ([0], [], INVALID), ([], [0], INVALID)]:
        _hold(push(src, dst), expected, (src, dst))
        pair.unchanged()
    actors.pause(0.5)  # the second look of "unchanged": late writes would come within this time
    pair.unchanged()
    push([112], [0]).ok()
    push([np.int64(112)], [1]).ok()
    push([0], [210]).ok()
    pair.blocks_right([112, 112, 0], [0, 1, 210])


@pytest.mark.parametrize(
    ("src", "dst", "side", "index"),
    [
        ([7, 8], [0, 1], "src", 8),
        ([6, 7, 8, 9], [0, 1, 2, 3], "src", 8),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], "src", 8),
        ([0, 1, 2], [6, 7, 8], "dst", 8),
    ],
)
@pytest.mark.rule("5.32", "5.57")
def test_b2_the_first_bad_index_of_a_run_is_named(
    pair: Pair, src: list[int], dst: list[int], side: str, index: int
) -> None:
    pair.up()
    pair.source(shape=Shape(dim0=8))
    pair.destination(shape=Shape(dim0=8 if side == "dst" else 16))
    outcome = pair.pull_blocks(src, dst).expect(INVALID, index)
    assert side in outcome.text or {"src": "source", "dst": "destination"}[side] in outcome.text
    pair.unchanged()


@pytest.mark.parametrize(("source", "destination"), [(65536, 131072), (131072, 65536)])
@pytest.mark.rule("5.33", "5.56", "5.82")
def test_b3_block_bytes_of_both_sides_are_compared(pair: Pair, source: int, destination: int) -> None:
    pair.up()
    pair.source(shape=Shape(dim0=4, stride=source))
    pair.destination(shape=Shape(dim0=4, stride=destination), model_id=0)
    pair.pull_blocks([0], [0]).expect(INVALID, source, destination)
    if pair.combo.mode == "B":
        push = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [0], [0])
        push.expect(INVALID, source, destination)
    pair.unchanged()


@pytest.mark.rule("5.33", "5.39", "5.40", "5.41", "5.42", "5.43", "5.49", "6.19")
def test_b3_slots_use_each_sides_own_stride(pair: Pair) -> None:
    pair.up()
    cache_id = pair.slots(shape=Shape(dim0=4, stride=100), keys=[(n + 7, 0) for n in range(4)])
    pair.slot_destination(shape=Shape(dim0=2, stride=60))
    pair.slot_destination("wide", shape=Shape(dim0=2, stride=200))
    key = by_request(10) if pair.combo.mode == "A" else by_id(cache_id, 3)
    pair.pull_cache(key, 1).ok()
    pair.right([([300], [60], 60)])
    pair.pull_cache(by_id(cache_id, 3), 1, -1, name="wide").expect(INVALID)
    pair.unchanged("wide")
    pair.pull_cache(by_id(cache_id, 3), 1, 100, name="wide").ok()
    pair.right([([300], [200], 100)], name="wide")


@pytest.mark.rule("5.40")
def test_b3_sizes_outside_the_strides_are_refused(pair: Pair) -> None:
    pair.up()
    cache_id = pair.slots(shape=Shape(dim0=4, stride=100))
    pair.slot_destination(shape=Shape(dim0=2, stride=60))
    for size in (0, -2, 61, 101, 2**62):
        pair.pull_cache(by_id(cache_id), 0, size).expect(INVALID, size)
    pair.unchanged()


@pytest.mark.rule("5.33", "5.73", "5.74")
def test_b3_a_push_of_a_larger_slot_is_refused(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.slots(shape=Shape(dim0=4, stride=100))
    small = pair.slot_destination(shape=Shape(dim0=2, stride=60))
    wide = pair.slot_destination("wide", shape=Shape(dim0=2, stride=200))
    pair.p.attempt(actors.push_cache, by_id(small, 0, D_ID), "src").expect(INVALID, 100, 60)
    pair.unchanged()
    pair.p.call(actors.push_cache, by_id(wide, 1, D_ID), "src", 3)
    pair.right([([300], [200], 100)], name="wide")


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.rule("5.59", "5.60", "5.61")
def test_b4_the_tail_block_gets_what_is_left_of_the_slot(pair: Pair, batch: int) -> None:
    pair.up()
    cache_id = pair.slots(shape=Shape(dim0=2, stride=28), keys=[(5, 0), (6, 0)])
    for name in ("four", "two", "five"):
        pair.destination(name, shape=Shape(dim0=9, stride=8))
    first = by_request(5 + batch) if pair.combo.mode == "A" else by_id(cache_id, batch)
    start = 28 * batch
    pair.pull_blocks([], [1, 3, 5, 7], first, "four").ok()
    heads = ([start, start + 8, start + 16], [8, 24, 40], 8)
    pair.right([heads, ([start + 24], [56], 4)], name="four")
    pair.pull_blocks([], [1, 3], by_id(cache_id, batch), "two").ok()
    pair.right([([start, start + 8], [8, 24], 8)], name="two")
    pair.pull_blocks([], [0, 1, 2, 3, 4], by_id(cache_id, batch), "five").expect(INVALID)
    pair.unchanged("five")


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
@pytest.mark.rule("5.65")
def test_b5_long_lists_of_scattered_blocks(pair: Pair, count: int) -> None:
    pair.up(timeout_ms=60_000)
    shape = Shape(tensors=2, dim0=count + 17, stride=64)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    rng = np.random.default_rng(count)
    src, dst = (rng.permutation(shape.dim0)[:count] for _ in range(2))
    pair.pull_blocks(src.tolist(), dst.tolist(), timeout=90).ok()
    pair.blocks_right(src, dst, timeout=60)
    pair.d.call(actors.check_link, P_ID)
    rest = np.setdiff1d(np.arange(shape.dim0), dst)[:1]
    pair.pull_blocks([0], rest).ok()


B6_SIZES = [4095, 4096, 4097, 65535, 65537, 2**20 - 1, 2**20 + 1, 2**22 - 1, 2**22 + 1, 3 * 2**22 + 7]
B6_COUNTS = [3, 1023, 1024, 1025, 2049]
B6_LIMIT = 64 << 20
B6_ALL = [(size, count) for size in B6_SIZES for count in B6_COUNTS if size * count <= B6_LIMIT]
B6_FAST = {(4095, 1025), (4097, 1023), (65535, 3), (4097, 2049), (2**22 + 1, 3), (65537, 3)}
B6_CASES = [case if case in B6_FAST else pytest.param(*case, marks=pytest.mark.slow) for case in B6_ALL]


@pytest.mark.parametrize(("size", "count"), B6_CASES)
@pytest.mark.parametrize("adjacent", [True, False], ids=["adjacent", "scattered"])
def test_b6_no_boundary_of_chunks_shows(pair: Pair, size: int, count: int, adjacent: bool) -> None:
    pair.up(timeout_ms=20_000)
    shape = Shape(tensors=1, dim0=count + 2, stride=size)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    rng = np.random.default_rng(size + count)
    src, dst = (rng.permutation(shape.dim0)[:count] for _ in range(2))
    if adjacent:
        src, dst = np.arange(count), np.arange(1, count + 1)
    pair.pull_blocks(src, dst).ok()
    pair.blocks_right(src, dst)


B7_LISTS = [
    ([7, 3, 9], [1, 0, 2]),
    ([5, 5, 5], [0, 4, 2]),
    ([9, 8, 7, 6], [3, 2, 1, 0]),
    ([1, 2, 3, 5, 6], [0, 1, 2, 3, 4]),
    ([0, 1, 4, 5], [8, 9, 2, 3]),
]


@pytest.mark.rule("5.62")
def test_b7_order_and_repetition_are_kept(pair: Pair) -> None:
    pair.up()
    shape = Shape(dim0=10, stride=96)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    for src, dst in B7_LISTS:
        pair.pull_blocks(src, dst).ok()
        pair.blocks_right(src, dst)
        pair.d.call(actors.refill, "dst", None)


@pytest.mark.parametrize("cases", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_b7_random_lists_equal_a_numpy_model(pair: Pair, cases: int) -> None:
    pair.up()
    shape = Shape(tensors=2, dim0=24, stride=40)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    text = pair.d.call(_random_pulls, cases, SEED, shape.tensor_nbytes, shape.stride)
    assert not text, text


def _random_pulls(w: Any, cases: int, seed: int, tensor_nbytes: int, stride: int) -> str:
    rng = np.random.default_rng(7)
    for case in range(cases):
        count = int(rng.integers(1, 25))
        src, dst = rng.integers(0, 24, count), rng.permutation(24)[:count]
        actors.refill(w, "dst", None)
        actors.pull_blocks(w, of_model(0), "dst", src.tolist(), dst)
        pieces = [(src * stride, dst * stride, stride)]
        text = actors.compare(w, "dst", seed=seed, src_tensor_nbytes=tensor_nbytes, pieces=pieces)
        if text:
            return f"case {case}, {src} to {dst}: {text}"
    return ""


@pytest.mark.rule("5.54")
def test_an_empty_destination_list_is_refused(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    pair.pull_blocks([], []).expect(INVALID)
    assert pair.pull_blocks([0], [0]).code == SUCCESS


@pytest.mark.rule("5.44", "5.50", "5.75")
def test_batch_indices_outside_either_cache(pair: Pair) -> None:
    pair.up()
    cache_id = pair.slots(shape=Shape(dim0=4, stride=100))
    into = pair.slot_destination(shape=Shape(dim0=2, stride=100))
    for batch in (2, 2**32 - 1):
        pair.pull_cache(by_id(cache_id), batch).expect(INVALID, batch)
    pair.pull_cache(by_id(cache_id, 4), 0).expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, 4)
    pair.pull_cache(by_id(99), 0).expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, 99)
    for batch in (-1, 2**32):
        assert type(pair.pull_cache(by_id(cache_id), batch).error) is ValueError
    if pair.combo.mode == "B":
        for target, source in ((2, 0), (0, 4)):
            push = pair.p.attempt(actors.push_cache, by_id(into, target, D_ID), "src", source)
            push.expect(INVALID, max(target, source))
    pair.unchanged()


@pytest.mark.rule("5.35", "5.38", "5.51", "5.53", "5.58")
def test_each_kind_of_cache_has_its_own_calls(pair: Pair) -> None:
    pair.up()
    blocks_id, slots_id = pair.source("blocks"), pair.slots("slots")
    pair.destination("to_blocks")
    pair.slot_destination("to_slots")
    pair.pull_cache(by_id(blocks_id), name="to_slots").expect(INVALID)
    pair.pull_cache(by_id(slots_id), name="to_blocks").expect(INVALID)
    pair.pull_blocks([0], [0], name="to_slots").expect(INVALID)
    pair.pull_blocks([0], [0], by_id(slots_id), name="to_blocks").expect(INVALID)
    if pair.combo.mode == "B":
        assert type(pair.pull_cache(by_request(5), name="to_slots").error) is TypeError
    for name in ("to_blocks", "to_slots"):
        pair.unchanged(name)


@pytest.mark.rule("5.70", "5.79")
def test_pushes_need_mode_b(pair_a: Pair) -> None:
    pair = pair_a.up()
    pair.source()
    pair.slots("slots")
    into = pair.slot_destination()
    pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [0], [0]).expect(INVALID)
    pair.p.attempt(actors.push_cache, by_id(into, 0, D_ID), "slots").expect(INVALID)
    pair.unchanged()
