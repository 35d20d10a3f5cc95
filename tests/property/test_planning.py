"""Every plan against the contract written down as plain loops: the same bytes, or the same refusal."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core import planning
from llm_datadist._core.layout import Layout
from llm_datadist._core.requests import Layers
from llm_datadist.status import ParamInvalidError
from tests.support.streams import FlatCache, run

SRC_AT, DST_AT = 1 << 20, 1 << 30
Moves = list[tuple[int, int]]  # (source tensor, destination tensor)


def ranges() -> st.SearchStrategy[range | None]:
    exact = st.builds(range, st.integers(0, 4), st.integers(0, 6))
    strange = st.builds(range, st.integers(-2, 5), st.integers(-2, 70), st.sampled_from([1, 2, -1]))
    return st.one_of(st.none(), exact, exact, strange)


layers_strategy = st.builds(Layers, ranges(), ranges(), st.sampled_from([0, 1, 1, 2, 2, 3]))


few = st.sampled_from([1, 2, 3, 4, 4, 6, 8])


@st.composite
def layered(draw: st.DrawFn) -> tuple[Layers, int, int]:
    """Layer ranges and the numbers of tensors; mostly such that the two sides fit."""
    kind = draw(st.sampled_from(["both", "both", "src", "dst", "all", "strange"]))
    if kind == "strange":
        return draw(layers_strategy), draw(few), draw(few)
    n = draw(st.integers(1, 3))
    totals = [draw(st.integers(1, 4)) for _ in range(2)]
    count = draw(st.integers(1, min(totals)))
    starts = [draw(st.integers(0, total - count)) for total in totals]
    src, dst = (range(start, start + count) for start in starts)
    if kind == "both":
        # Now and then a range that ends one layer late, or a tensor that belongs to no layer.
        late, odd = (draw(st.sampled_from([0, 0, 0, 1])) for _ in range(2))
        src = range(src.start + late, src.stop + late)
        return Layers(src, dst, n), totals[0] * n, totals[1] * n + odd
    if kind == "src":
        return Layers(src, None, n), totals[0] * n, count * n
    if kind == "dst":
        return Layers(None, dst, n), count * n, totals[1] * n
    return Layers(None, range(7, 7), n), totals[0], totals[0]


def rarely(draw: st.DataObject) -> bool:
    """True once in a while: for what is to be refused."""
    return draw.draw(st.integers(0, 7)) == 5


def model_layers(layers: Layers, src_tensors: int, dst_tensors: int) -> Moves | None:
    """The pairs of tensors that correspond, by the contract's words on layer ranges; None: refused."""
    n = layers.tensors_per_layer
    if n == 0:
        return None
    sides: list[list[int]] = []
    used = [bool(r) for r in (layers.src, layers.dst)]
    for layer_range, tensors in ((layers.src, src_tensors), (layers.dst, dst_tensors)):
        if any(used) and tensors % n:
            return None
        if not layer_range:
            sides.append(list(range(tensors)))
            continue
        if layer_range.step != 1 or layer_range.start < 0:
            return None
        sides.append([i * n + k for i in layer_range for k in range(n)])
        if sides[-1][-1] >= tensors:
            return None
    if len(sides[0]) != len(sides[1]):
        return None
    return list(zip(*sides, strict=True))


class Case(NamedTuple):
    """Two caches with bytes of their own."""

    src: FlatCache
    dst: FlatCache

    @classmethod
    def of(cls, src: Layout, dst: Layout) -> Case:
        return cls(FlatCache.of(src, SRC_AT, 1), FlatCache.of(dst, DST_AT, 2))


@given(st.data())
@settings(max_examples=150)
def test_pull_cache(data: st.DataObject) -> None:
    layers, *tensors = data.draw(layered())
    src, dst = (Layout(t, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))) for t in tensors)
    src_batch = data.draw(st.integers(0, src.dim0 - 1))
    dst_batch = data.draw(st.integers(0, dst.dim0 - 1))
    size = data.draw(st.one_of(st.just(-1), st.integers(1, dst.stride_nbytes)))
    moves = model_layers(layers, src.num_tensors, dst.num_tensors)
    nbytes = dst.stride_nbytes if size == -1 else size
    if moves is None or nbytes > src.stride_nbytes:
        with pytest.raises(ParamInvalidError):
            planning.plan_slot(src, src_batch, dst, dst_batch, size, layers)
        return
    case = Case.of(src, dst)
    wanted = case.dst.copy()
    for s, d in moves:
        wanted.unit(d, dst_batch)[:nbytes] = case.src.unit(s, src_batch)[:nbytes]
    run(case.src, case.dst, *planning.plan_slot(src, src_batch, dst, dst_batch, size, layers))
    assert np.array_equal(case.dst.memory, wanted.memory)


@given(st.data())
@settings(max_examples=150)
def test_push_cache(data: st.DataObject) -> None:
    layers, *tensors = data.draw(layered())
    src, dst = (Layout(t, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))) for t in tensors)
    src_batch = data.draw(st.integers(0, src.dim0 - 1))
    dst_batch = dst.dim0 if rarely(data) else data.draw(st.integers(0, dst.dim0 - 1))
    moves = model_layers(layers, src.num_tensors, dst.num_tensors)
    if moves is None or src.stride_nbytes > dst.stride_nbytes or dst_batch >= dst.dim0:
        with pytest.raises(ParamInvalidError):
            planning.plan_slot_push(src, src_batch, dst, dst_batch, layers)
        return
    case = Case.of(src, dst)
    wanted = case.dst.copy()
    for s, d in moves:
        wanted.unit(d, dst_batch)[: src.stride_nbytes] = case.src.unit(s, src_batch)
    run(case.src, case.dst, *planning.plan_slot_push(src, src_batch, dst, dst_batch, layers))
    assert np.array_equal(case.dst.memory, wanted.memory)


def u64(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def plan_blocks_like_the_model(
    src: Layout, src_blocks: list[int], dst: Layout, dst_blocks: list[int], layers: Layers
) -> None:
    moves = model_layers(layers, src.num_tensors, dst.num_tensors)
    bad = (
        moves is None
        or src.stride_nbytes != dst.stride_nbytes
        or any(b >= src.dim0 for b in src_blocks)
        or any(b >= dst.dim0 for b in dst_blocks)
        or len(set(dst_blocks)) != len(dst_blocks)
        or len(src_blocks) != len(dst_blocks)
    )
    if bad or moves is None:
        with pytest.raises(ParamInvalidError):
            planning.plan_blocks(src, u64(src_blocks), dst, u64(dst_blocks), layers)
        return
    case = Case.of(src, dst)
    wanted = case.dst.copy()
    for s, d in moves:
        for a, b in zip(src_blocks, dst_blocks, strict=True):
            wanted.unit(d, b)[:] = case.src.unit(s, a)
    run(case.src, case.dst, *planning.plan_blocks(src, u64(src_blocks), dst, u64(dst_blocks), layers))
    assert np.array_equal(case.dst.memory, wanted.memory)


@given(st.data())
@settings(max_examples=150)
def test_blocks_with_layers_and_bad_input(data: st.DataObject) -> None:
    layers, *tensors = data.draw(layered())
    stride = data.draw(st.integers(1, 3))
    src, dst = (Layout(t, data.draw(st.integers(1, 6)), stride) for t in tensors)
    if rarely(data):
        dst = Layout(dst.num_tensors, dst.dim0, stride + 1)
    count = data.draw(st.integers(1, dst.dim0))
    dst_blocks = data.draw(st.permutations(range(dst.dim0)))[:count]
    src_blocks = data.draw(st.lists(st.integers(0, src.dim0 - 1), min_size=count, max_size=count))
    if rarely(data):
        dst_blocks[-1] = data.draw(st.sampled_from([dst_blocks[0], dst.dim0]))
    if rarely(data):
        src_blocks[-1] = src.dim0
    if rarely(data):
        src_blocks.append(0)
    plan_blocks_like_the_model(src, src_blocks, dst, dst_blocks, layers)


def test_b7_two_thousand_random_block_lists() -> None:
    """Row B7: order and repetition, descending runs, runs that touch."""
    rng = np.random.default_rng(7)
    for _ in range(2000):
        src, dst = (Layout(2, int(rng.integers(1, 14)), 3) for _ in range(2))
        count = int(rng.integers(1, dst.dim0 + 1))
        src_blocks = _some_list(rng, src.dim0, count, repeat=True)
        dst_blocks = _some_list(rng, dst.dim0, count, repeat=False)
        plan_blocks_like_the_model(src, src_blocks, dst, dst_blocks, Layers())


def _some_list(rng: np.random.Generator, dim0: int, count: int, *, repeat: bool) -> list[int]:
    """Scattered, or ascending or descending runs that may touch."""
    kind = int(rng.integers(0, 3))
    if kind == 0 or count > dim0:
        return [int(b) for b in rng.choice(dim0, count, replace=repeat or count > dim0)]
    start = int(rng.integers(0, dim0 - count + 1))
    run_ = list(range(start, start + count))
    return run_ if kind == 1 else run_[::-1]


@given(st.data())
@settings(max_examples=150)
def test_slot_to_blocks(data: st.DataObject) -> None:
    layers, *tensors = data.draw(layered())
    src = Layout(tensors[0], data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20)))
    dst = Layout(tensors[1], data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    batch = data.draw(st.integers(0, src.dim0 - 1))
    blocks = data.draw(st.permutations(range(dst.dim0)))[: data.draw(st.integers(1, dst.dim0))]
    if rarely(data):
        blocks[-1] = data.draw(st.sampled_from([blocks[0], dst.dim0]))
    moves = model_layers(layers, src.num_tensors, dst.num_tensors)
    bs, slot = dst.stride_nbytes, src.stride_nbytes
    bad = len(set(blocks)) != len(blocks) or max(blocks) >= dst.dim0 or (len(blocks) - 1) * bs >= slot
    if moves is None or bad:
        with pytest.raises(ParamInvalidError):
            planning.plan_slot_to_blocks(src, batch, dst, u64(blocks), layers)
        return
    case = Case.of(src, dst)
    wanted = case.dst.copy()
    for s, d in moves:
        for k, block in enumerate(blocks):
            piece = case.src.unit(s, batch)[k * bs : (k + 1) * bs]
            wanted.unit(d, block)[: len(piece)] = piece
    run(case.src, case.dst, *planning.plan_slot_to_blocks(src, batch, dst, u64(blocks), layers))
    assert np.array_equal(case.dst.memory, wanted.memory)


@given(st.integers(1, 5), st.integers(0, 2), st.integers(1, 6), st.integers(1, 9), st.data())
@settings(max_examples=60)
def test_a_part_of_a_slice_is_that_part_of_its_stream(
    t: int, start: int, dim0: int, stride: int, data: st.DataObject
) -> None:
    layout = Layout(start + t, dim0, stride)
    blocks = data.draw(st.lists(st.integers(0, dim0 - 1), min_size=1, unique=True))
    layers = Layers(range(start, start + t), range(start, start + t), 1)
    whole, _ = planning.plan_blocks(layout, u64(blocks), layout, u64(blocks), layers)
    first = data.draw(st.integers(0, t - 1))
    part = whole.tensors(first, data.draw(st.integers(1, t - first)))
    cache, moved = FlatCache.of(layout, SRC_AT, 1), FlatCache.of(layout, DST_AT, 2)
    wanted = moved.copy()
    run(cache, moved, part, part)
    for tensor in range(start + first, start + first + part.tensor_count):
        for b in blocks:
            wanted.unit(tensor, b)[:] = cache.unit(tensor, b)
    assert np.array_equal(moved.memory, wanted.memory)


hostile = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([-(2**63), -(2**31), 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]),
)


@given(st.data())
@settings(max_examples=150)
def test_numbers_of_a_peer_end_in_a_plan_or_in_param_invalid(data: st.DataObject) -> None:
    """Plans of pushes are made at the destination, of numbers that the peer sent."""
    layers = Layers(
        *(data.draw(st.one_of(st.none(), st.builds(range, hostile, hostile))) for _ in range(2)),
        data.draw(hostile),
    )
    src, dst = Layout(4, 3, 8), Layout(4, 3, 8)
    blocks = [u64(data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))) for _ in range(2)]
    batch = data.draw(hostile)
    plans = (
        lambda: planning.plan_slot_push(src, batch, dst, 0, layers),
        lambda: planning.plan_slot_push(src, 0, dst, batch, layers),
        lambda: planning.plan_blocks(src, blocks[0], dst, blocks[1], layers),
        lambda: planning.plan_slot_to_blocks(src, batch, dst, blocks[0], layers),
        lambda: planning.plan_slot(src, batch, dst, 0, -1, layers),
    )
    for plan in plans:
        try:
            source, target = plan()
        except ParamInvalidError:
            continue
        for part, layout in ((source, src), (target, dst)):
            assert 0 <= part.first_tensor < part.first_tensor + part.tensor_count <= layout.num_tensors
            assert int(part.indices.max()) < layout.dim0
        assert source.nbytes == target.nbytes > 0
