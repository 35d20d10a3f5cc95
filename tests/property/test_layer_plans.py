"""Layer-wise plans against the contract written down as plain loops, by key and by raw address."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core import layer_plans
from llm_datadist._core.layer_plans import LayerBlocks
from llm_datadist._core.layout import Layout
from llm_datadist._core.requests import Layers, PushLayers
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.enums import Placement
from llm_datadist.keys import BlocksCacheKey
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import ParamInvalidError
from tests.support.streams import FlatCache, run

SRC_AT, DST_AT = 1 << 20, 1 << 30


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def rarely(data: st.DataObject) -> bool:
    """True once in a while: for what is to be refused."""
    return data.draw(st.integers(0, 7)) == 5


def u64(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def request(
    config: Any,
    *,
    tensors: int = 6,
    dim0: int = 4,
    stride: int = 8,
    src: list[int] | None = None,
    dst: list[int] | None = None,
    nbytes: int | None = None,
    placement: Placement = Placement.DEVICE,
) -> tuple[PushLayers, Layout]:
    desc = CacheDesc(tensors, [dim0, stride], DataType.DT_INT8, placement)
    cache = Cache(1, desc, [1] * tensors)
    lists = [None if b is None else u64(b) for b in (src, dst)]
    return PushLayers(cache, Ready(), (config,), lists[0], lists[1], nbytes), Layout.of(desc)


def by_key(src: range = range(0, 3), dst: range = range(0, 3), batch: int = 0) -> TransferWithCacheKeyConfig:
    return TransferWithCacheKeyConfig(BlocksCacheKey(2), src, dst, batch)


def by_address(count: int = 6, layers: range | None = None, batch: int = 0) -> TransferConfig:
    return TransferConfig(2, [64] * count, layers, batch)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (by_key(), {}),
        (by_key(range(1, 2), range(0, 1)), {}),
        (by_key(range(1, 3), range(7, 9)), {}),
        (by_key(), {"src": [0, 3], "dst": [900, 2]}),
        (by_key(), {"src": [0, 0], "dst": [1, 2], "nbytes": 0}),
        (by_key(), {"src": [0], "dst": [1], "nbytes": 8}),
        (by_key(), {"src": [], "dst": [], "nbytes": 0}),
        (by_key(), {"dst": [5, 1, 2], "nbytes": 3}),
        (by_address(), {}),
        (by_address(2, range(1, 2)), {}),
        (by_address(6, range(2, 2)), {}),
        (by_address(batch=3), {}),
    ],
)
@pytest.mark.rule("5.89", "5.103")
def test_what_the_contract_allows(config: Any, options: dict[str, Any]) -> None:
    asked, layout = request(config, **options)
    blocks = layer_plans.check_push_layers(asked, layout)
    assert blocks.src.tolist() == (options.get("src") or [])
    assert blocks.dst.tolist() == (options.get("dst") or [])
    assert blocks.unit_nbytes == (options.get("nbytes") or 0)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (by_key(), {"placement": Placement.HOST}, "HOST"),
        (by_key(range(0, 2), range(0, 2)), {"tensors": 5}, "even"),
        (by_key(range(0, 3), range(0, 2)), {}, "equal length"),
        (by_key(range(0, 0), range(0, 0)), {}, "both are needed"),
        (by_key(range(0, 4), range(0, 4)), {}, "3 layers"),
        (by_key(range(0, 3, 2), range(0, 2)), {}, "step"),
        (by_key(range(0, 2), range(0, 3, 2)), {}, "step"),
        (by_key(range(0, 2), range(-1, 1)), {}, "start"),
        (by_key(range(-1, 1), range(0, 2)), {}, "start"),
        (by_key(range(0, 2), range(2**70, 2**70 + 2)), {}, "layers"),
        (by_key(range(0, 2), range(0, 2**70)), {}, "layers"),
        (by_key(range(0, 2**70), range(0, 2)), {}, "layers"),
        (by_key(batch=4), {}, "src_batch_index is 4"),
        (by_key(), {"src": [0, 1], "dst": [0]}, "equal"),
        (by_key(), {"src": [0, 1]}, "equal"),
        (by_key(), {"src": [0, 4], "dst": [0, 1]}, "src_block_indices\\[1\\] is 4"),
        (by_key(), {"src": [0, 1], "dst": [7, 7]}, "block 7 more than once"),
        (by_key(), {"src": [0], "dst": [0], "nbytes": 7}, "7.*8 bytes"),
        (by_key(), {"dst": [0], "nbytes": None}, "needed"),
        (by_key(), {"dst": [0], "nbytes": 0}, "needed"),
        (by_key(), {"dst": [0], "nbytes": -1}, "negative"),
        (by_key(), {"dst": [0, 1, 2], "nbytes": 4}, "at most 2"),
        (by_key(), {"nbytes": 8}, "no dst_block_indices"),
        (by_address(5), {}, "5 addresses"),
        (by_address(6, range(0, 2)), {}, "6 addresses for 2 layers"),
        (by_address(6, range(1, 4)), {}, "3 layers"),
        (by_address(batch=4), {}, "src_batch_index is 4"),
    ],
)
@pytest.mark.rule("5.86", "5.88", "5.90", "5.93", "5.98", "5.99", "5.100")
def test_what_the_caller_is_refused(config: Any, options: dict[str, Any], words: str) -> None:
    asked, layout = request(config, **options)
    with pytest.raises(ParamInvalidError, match=words):
        layer_plans.check_push_layers(asked, layout)


@given(st.data())
@settings(max_examples=150)
@pytest.mark.rule("5.87", "5.94", "5.105")
def test_by_key(data: st.DataObject) -> None:
    """Layers by position (row A5), blocks by size rules; a refusal exactly where the contract has one."""
    totals = [data.draw(st.integers(1, 4)) for _ in range(2)]
    src = Layout(2 * totals[0], data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)))
    stride = src.stride_nbytes if data.draw(st.booleans()) else data.draw(st.integers(1, 9))
    dst = Layout(2 * totals[1], data.draw(st.integers(3, 5)), stride)
    count = data.draw(st.integers(1, min(totals)))
    starts = [data.draw(st.integers(0, total - count)) for total in totals]
    starts[1] += rarely(data)
    layers = Layers(*(range(s, s + count) for s in starts), 2)
    kind = data.draw(st.sampled_from(["slot", "blocks", "pieces"]))
    is_blocks = (kind != "slot") != rarely(data)
    batches = [data.draw(st.integers(0, side.dim0 - 1)) for side in (src, dst)]
    n = 0 if kind == "slot" else data.draw(st.integers(1, 3))
    dst_blocks = data.draw(st.permutations(range(dst.dim0 + rarely(data))))[:n]
    src_blocks = (
        data.draw(st.lists(st.integers(0, src.dim0 - 1), min_size=n, max_size=n)) if kind == "blocks" else []
    )
    unit = 0 if kind != "pieces" else stride + rarely(data)
    bad = (
        is_blocks != (kind != "slot")
        or any(2 * (s + count) > side.num_tensors for s, side in zip(starts, (src, dst), strict=True))
        or any(b >= dst.dim0 for b in dst_blocks)
        or (kind == "slot" and src.stride_nbytes > stride)
        or (kind == "blocks" and src.stride_nbytes != stride)
        or (kind == "pieces" and (unit != stride or (n - 1) * stride >= src.stride_nbytes))
    )
    blocks = LayerBlocks(u64(src_blocks), u64(dst_blocks), unit)

    def plan() -> Any:
        return layer_plans.plan_layers_by_key(
            src, batches[0], dst, batches[1], dst_is_blocks=is_blocks, blocks=blocks, layers=layers
        )

    if bad:
        with pytest.raises(ParamInvalidError):
            plan()
        return
    mine, theirs = FlatCache.of(src, SRC_AT, 1), FlatCache.of(dst, DST_AT, 2)
    wanted = theirs.copy()
    for tensor in range(2 * count):
        s, d = 2 * starts[0] + tensor, 2 * starts[1] + tensor
        if kind == "slot":
            wanted.unit(d, batches[1])[: src.stride_nbytes] = mine.unit(s, batches[0])
        for k, block in enumerate(dst_blocks):
            if kind == "blocks":
                wanted.unit(d, block)[:] = mine.unit(s, src_blocks[k])
            else:
                piece = mine.unit(s, batches[0])[k * stride : (k + 1) * stride]
                wanted.unit(d, block)[: len(piece)] = piece
    run(mine, theirs, *plan())
    assert np.array_equal(theirs.memory, wanted.memory)


@given(st.data())
@settings(max_examples=150)
@pytest.mark.rule("5.90", "5.104")
def test_by_address(data: st.DataObject) -> None:
    """Block b of a tensor lies at its address + b * dst_block_memory_size; addresses start with the range."""
    src = Layout(2 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)))
    start = data.draw(st.integers(0, src.num_tensors // 2 - 1))
    layers = Layers(range(start, data.draw(st.integers(start + 1, src.num_tensors // 2))), None, 2)
    assert layers.src is not None
    tensors = 2 * len(layers.src)
    kind = data.draw(st.sampled_from(["slot", "blocks", "pieces"]))
    batch = data.draw(st.integers(0, src.dim0 - 1))
    unit = data.draw(st.integers(1, 9)) if kind == "pieces" else src.stride_nbytes
    most = {"slot": 0, "blocks": 3, "pieces": -(-src.stride_nbytes // unit)}[kind]
    n = data.draw(st.integers(min(1, most), min(most, 3)))
    dst_blocks = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n, unique=True))
    src_blocks = (
        data.draw(st.lists(st.integers(0, src.dim0 - 1), min_size=n, max_size=n)) if kind == "blocks" else []
    )
    given_unit = (
        unit if kind == "pieces" else data.draw(st.sampled_from([0, unit])) if kind == "blocks" else 0
    )
    blocks = LayerBlocks(u64(src_blocks), u64(dst_blocks), given_unit)
    mine, theirs = FlatCache.of(src, SRC_AT, 1), FlatCache.of(Layout(tensors, 6, unit), DST_AT, 2)
    wanted = theirs.copy()
    written: set[tuple[int, int]] = set()
    for tensor in range(tensors):
        slot = mine.unit(2 * start + tensor, batch)
        if kind == "slot":
            wanted.unit(tensor, 0)[:] = slot
        for k, block in enumerate(dst_blocks):
            piece = (
                mine.unit(2 * start + tensor, src_blocks[k])
                if kind == "blocks"
                else slot[k * unit : (k + 1) * unit]
            )
            wanted.unit(tensor, block)[: len(piece)] = piece
            written.add((block * unit, len(piece)))
    source, target = layer_plans.plan_layers_by_address(src, batch, tensors, blocks, layers)
    run(mine, theirs, source, target)
    assert np.array_equal(theirs.memory, wanted.memory)
    offsets, lengths = layer_plans.written_units(theirs.bases, target)
    assert set(zip(offsets.tolist(), lengths.tolist(), strict=True)) == (written or {(0, unit)})
    with pytest.raises(ParamInvalidError, match="addresses"):
        layer_plans.plan_layers_by_address(src, batch, tensors + 1, blocks, layers)


def test_units_beyond_the_address_space_are_refused() -> None:
    _, target = layer_plans.plan_layers_by_address(
        Layout(2, 1, 16), 0, 2, LayerBlocks(u64([0]), u64([3]), 16), Layers(None, None, 2)
    )
    layer_plans.written_units(u64([8, 2**64 - 1 - 64]), target)
    with pytest.raises(ParamInvalidError, match="address space"):
        layer_plans.written_units(u64([8, 2**64 - 64]), target)


hostile = st.one_of(
    st.integers(-3, 40), st.sampled_from([-(2**63), 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, 2**65])
)


@given(
    hostile,
    hostile,
    st.lists(st.integers(0, 5), max_size=3),
    st.lists(st.one_of(st.integers(0, 5), st.just(2**64 - 1)), max_size=3),
    st.one_of(st.none(), st.builds(range, hostile, hostile)),
)
@settings(max_examples=150)
def test_numbers_of_a_peer_end_in_a_plan_or_in_param_invalid(
    batch: int, unit: int, src: list[int], dst: list[int], layers: range | None
) -> None:
    layout, blocks = Layout(4, 3, 8), LayerBlocks(u64(src), u64(dst), unit)
    bases = u64([4096, 8192, 1 << 40, 1 << 41])
    wanted = Layers(layers, layers, 2)
    try:
        source, target = layer_plans.plan_layers_by_address(layout, batch, 4, blocks, wanted)
        _, lengths = layer_plans.written_units(bases, target)
        assert int(lengths.sum()) * 4 == source.nbytes == target.nbytes > 0
        assert len(set(dst)) == len(dst)
    except ParamInvalidError:
        pass
    for is_blocks in (False, True):
        try:
            source, target = layer_plans.plan_layers_by_key(
                layout, batch, layout, 0, dst_is_blocks=is_blocks, blocks=blocks, layers=wanted
            )
            assert source.nbytes == target.nbytes > 0
        except ParamInvalidError:
            pass
