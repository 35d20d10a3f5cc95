"""Rows Y: tensors, layers and placements."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.pair import D_ID, Pair, Shape, by_id, of_model

INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
MANY = Shape(tensors=61, dim0=4, stride=128)


@pytest.mark.rule("5.17", "5.19", "5.22")
def test_y1_one_tensor_per_layer(pair: Pair) -> None:
    pair.up()
    pair.source(shape=MANY)
    pair.destination(shape=MANY)
    layer = {"src_layer_range": range(3, 4), "dst_layer_range": range(3, 4)}
    pair.pull_blocks([1], [2], **layer).expect(INVALID)
    pair.unchanged()
    pair.pull_blocks([1], [2], **layer, tensor_num_per_layer=1).ok()
    pair.blocks_right([1], [2], tensors=[(3, 3)])


@pytest.mark.rule("5.21")
def test_y1_all_tensors_without_a_range(pair: Pair) -> None:
    pair.up()
    pair.source(shape=MANY)
    pair.destination(shape=MANY, model_id=0)
    pair.source("one", shape=Shape(tensors=1, dim0=4, stride=128), model_id=1)
    pair.destination("single", shape=Shape(tensors=1, dim0=4, stride=128), model_id=1)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    pair.pull_blocks([3], [0], of_model(1), "single").ok()
    pair.blocks_right([3], [0], source="one", name="single")


@pytest.mark.rule("5.77")
def test_y1_all_tensors_of_a_push_without_a_range(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source(shape=MANY)
    pair.destination(shape=MANY, model_id=0)
    pair.slots("slots", shape=MANY)
    there = pair.slot_destination("there", shape=MANY)
    pair.p.call(actors.push_blocks, of_model(0, D_ID), "src", [1], [2])
    pair.blocks_right([1], [2])
    pair.p.call(actors.push_cache, by_id(there, 3, D_ID), "slots", 1)
    pair.blocks_right([1], [3], source="slots", name="there")


def test_y2_three_row_sizes_at_the_same_time(pair: Pair) -> None:
    pair.up()
    shapes = {0: Shape(stride=1024), 1: Shape(stride=128), 2: Shape(stride=64)}
    for model, shape in shapes.items():
        pair.source(f"src{model}", shape, model_id=model)
        pair.destination(f"dst{model}", shape)

    def pull(model: int) -> None:
        for _ in range(20):
            pair.pull_blocks([7, 0], [1, 2], of_model(model), f"dst{model}").ok()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(pull, shapes))
    for model in shapes:
        pair.blocks_right([7, 0], [1, 2], source=f"src{model}", name=f"dst{model}")
    pair.pull_blocks([0], [0], of_model(3), "dst0").expect(GONE, 3)


def _tensors(dst: range, src: range) -> list[tuple[int, int]]:
    """Tensor numbers of layers that correspond by position, two tensors per layer."""
    return [(2 * d + k, 2 * s + k) for d, s in zip(dst, src, strict=True) for k in (0, 1)]


@pytest.mark.rule("5.17")
def test_y3_layers_correspond_by_position(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=8))
    pair.destination(shape=Shape(tensors=28))
    pair.pull_blocks([1], [2], src_layer_range=range(0, 4), dst_layer_range=range(10, 14)).ok()
    pair.blocks_right([1], [2], tensors=_tensors(range(10, 14), range(0, 4)))


@pytest.mark.rule("5.24")
def test_y3_one_range_into_a_cache_of_exactly_that_many_tensors(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=8))
    pair.destination(shape=Shape(tensors=4))
    pair.pull_blocks([1], [2], src_layer_range=range(2, 4)).ok()
    pair.blocks_right([1], [2], tensors=_tensors(range(0, 2), range(2, 4)))


@pytest.mark.rule("5.24")
def test_y3_one_range_for_the_destination(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=4))
    pair.destination(shape=Shape(tensors=8))
    pair.pull_blocks([1], [2], dst_layer_range=range(1, 3)).ok()
    pair.blocks_right([1], [2], tensors=_tensors(range(1, 3), range(0, 2)))


BAD_RANGES: list[tuple[Any, Any, Any]] = [
    (range(0, 2), range(0, 1), INVALID),
    (range(0, 4, 2), range(0, 4, 2), INVALID),
    (range(-1, 1), range(0, 2), INVALID),
    (range(2, 5), range(2, 5), INVALID),
    (range(0, 1), None, INVALID),
    ([0, 1], range(0, 2), TypeError),
    (range(0, 2), [0, 1], TypeError),
    (1, None, TypeError),
]


@pytest.mark.rule("5.15", "5.16", "5.18", "5.20", "5.23", "5.24", "5.25")
def test_y3_ranges_that_cannot_be_met(pair: Pair) -> None:
    pair.up()
    cache_id = pair.slots("slots", shape=Shape(tensors=8))
    pair.source(shape=Shape(tensors=8))
    pair.destination(shape=Shape(tensors=8))
    pair.slot_destination("into", shape=Shape(tensors=8))
    for src, dst, expected in BAD_RANGES:
        ranges = {"src_layer_range": src, "dst_layer_range": dst}
        for outcome in (
            pair.pull_blocks([1], [2], **ranges),
            pair.pull_cache(by_id(cache_id), name="into", **ranges),
        ):
            got = outcome.code if expected is INVALID else type(outcome.error)
            assert got == expected, (src, dst, outcome)
    pair.pull_blocks([1], [2], src_layer_range=range(0, 2), tensor_num_per_layer=0).expect(INVALID)
    assert type(pair.pull_blocks([1], [2], tensor_num_per_layer=2**32).error) is ValueError
    assert type(pair.pull_blocks([1], [2], tensor_num_per_layer=2.0).error) is TypeError
    pair.unchanged()
    pair.unchanged("into")


@pytest.mark.rule("5.21")
def test_y3_an_empty_range_means_all_tensors(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=8))
    pair.destination(shape=Shape(tensors=8))
    pair.pull_blocks([1], [2], src_layer_range=range(3, 3), dst_layer_range=range(0, 0)).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("5.46")
def test_y_numbers_of_tensors_must_be_equal(pair: Pair) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=4))
    pair.destination(shape=Shape(tensors=6))
    pair.pull_blocks([1], [2]).expect(INVALID, 4, 6)
    pair.unchanged()


@pytest.mark.parametrize("source", ["HOST", "DEVICE"])
@pytest.mark.parametrize("destination", ["HOST", "DEVICE"])
@pytest.mark.rule("5.140", "5.141", "5.142")
def test_y4_any_placement_to_any(pair: Pair, source: str, destination: str) -> None:
    pair.up()
    pair.source(placement=source, accessible=True)
    pair.destination(placement=destination, accessible=True, model_id=0)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    if pair.combo.mode == "B":
        pair.d.call(actors.refill, "dst", None)
        pair.p.call(actors.push_blocks, of_model(0, D_ID), "src", [4], [5])
        pair.blocks_right([4], [5])


@pytest.mark.rule("6.16", "6.17", "6.18")
def test_y4_host_memory_is_not_accessible_by_default(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source(placement="HOST")
    cache_id = pair.slots("slots", placement="HOST")
    pair.destination(placement="HOST", model_id=0)
    pair.slot_destination("into")
    pair.pull_blocks([1], [2]).expect(INVALID, "remote_accessible")
    pair.pull_cache(by_id(cache_id), name="into").expect(INVALID, "remote_accessible")
    push = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [4], [5])
    push.expect(INVALID, "remote_accessible")
    pair.unchanged()
    pair.unchanged("into")


def test_y4_host_memory_needs_no_mark_in_mode_a(pair_a: Pair) -> None:
    pair = pair_a.up()
    pair.source(placement="HOST")
    pair.destination(placement="HOST")
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
