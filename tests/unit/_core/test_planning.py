"""What a call is refused for by its own side, and the rows B1-B4, Y1 and Y3 of the fault table on plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist._core import planning
from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.requests import Layers, PullBlocks, PullCache, PushBlocks, PushCache
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import ParamInvalidError

LAYOUT = Layout(6, 4, 8)
CACHE = Cache(3, CacheDesc(6, [4, 8], DataType.DT_INT8), [1] * 6)
BY_ID, BY_REQ, BLOCKS = CacheKeyByIdAndIndex(1, 1), CacheKey(1, 1), BlocksCacheKey(1)


def u64(*values: int) -> Any:
    return np.array(values, dtype=np.uint64)


ALL, ONE = Layers(), u64(0)


def pull_cache(batch: int = 0, size: int = -1, *, is_blocks: bool = False, layers: Layers = ALL) -> None:
    request = PullCache(BY_REQ, CACHE, batch, size, layers)
    planning.check_pull_cache(request, LAYOUT, dst_is_blocks=is_blocks)


def pull_blocks(
    src: Any = ONE, dst: Any = ONE, key: Any = BLOCKS, *, is_blocks: bool = True, layers: Layers = ALL
) -> None:
    request = PullBlocks(key, CACHE, src, dst, layers)
    planning.check_pull_blocks(request, LAYOUT, dst_is_blocks=is_blocks)


def push_cache(batch: int = 0, size: int = -1, *, is_blocks: bool = False, layers: Layers = ALL) -> None:
    request = PushCache(BY_ID, CACHE, batch, size, layers)
    planning.check_push_cache(request, LAYOUT, src_is_blocks=is_blocks)


def push_blocks(src: Any = ONE, dst: Any = ONE, *, is_blocks: bool = True, layers: Layers = ALL) -> None:
    request = PushBlocks(BLOCKS, CACHE, src, dst, layers)
    planning.check_push_blocks(request, LAYOUT, src_is_blocks=is_blocks)


def test_what_is_fine() -> None:
    for batch, size in ((0, -1), (3, 8), (0, 1)):
        pull_cache(batch, size)
    pull_blocks(u64(9, 9, 2**64 - 1), u64(3, 0, 1))  # the peer's indices are looked at with its layout
    for key in (BY_REQ, BY_ID):
        pull_blocks(u64(), u64(3, 0), key)
    push_cache(3)
    push_blocks(u64(3, 3), u64(2**64 - 1, 0))


@pytest.mark.parametrize(
    ("check", "args", "options", "words"),
    [
        (pull_cache, (), {"is_blocks": True}, "cache 3 is a blocks cache"),
        (pull_cache, (4,), {}, "batch_index is 4.*4 slots"),
        (pull_cache, (0, 0), {}, "size is 0"),
        (pull_cache, (0, -2), {}, "size is -2"),
        (pull_cache, (0, 9), {}, r"size is 9.*1\.\.8"),
        (pull_blocks, (), {"is_blocks": False}, "cache 3 is not a blocks cache"),
        (pull_blocks, (u64(), u64()), {}, "dst_blocks is empty"),
        (pull_blocks, (u64(), u64(0)), {}, "0 entries and dst_blocks 1"),
        (pull_blocks, (u64(1, 2), u64(0)), {}, "2 entries and dst_blocks 1"),
        (pull_blocks, (u64(0), u64(0), BY_REQ), {}, "names a slot"),
        (pull_blocks, (u64(0), u64(0), BY_ID), {}, "names a slot"),
        (pull_blocks, (u64(0), u64(4)), {}, r"dst_blocks\[0\] is 4"),
        (pull_blocks, (u64(), u64(1, 2, 4), BY_ID), {}, r"dst_blocks\[2\] is 4"),
        (pull_blocks, (u64(0), u64(2**63)), {}, rf"dst_blocks\[0\] is {2**63}"),
        (pull_blocks, (u64(0, 1), u64(3, 3)), {}, "block 3 more than once"),
        (push_cache, (), {"is_blocks": True}, "cache 3 is a blocks cache"),
        (push_cache, (4,), {}, "src_batch_index is 4"),
        (push_cache, (0, 8), {}, "size is 8"),
        (push_cache, (0, 0), {}, "size is 0"),
        (push_blocks, (), {"is_blocks": False}, "cache 3 is not a blocks cache"),
        (push_blocks, (u64(), u64()), {}, "empty"),
        (push_blocks, (u64(0), u64()), {}, "empty"),
        (push_blocks, (u64(), u64(0)), {}, "empty"),
        (push_blocks, (u64(0, 1), u64(0)), {}, "2 entries and dst_blocks 1"),
        (push_blocks, (u64(0, 4), u64(0, 1)), {}, r"src_blocks\[1\] is 4"),
        (push_blocks, (u64(0, 1), u64(9, 9)), {}, "block 9 more than once"),
    ],
)
@pytest.mark.rule("5.72", "5.76")
def test_what_is_refused(check: Any, args: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamInvalidError, match=words):
        check(*args, **options)


@pytest.mark.parametrize("check", [pull_cache, pull_blocks, push_cache, push_blocks])
@pytest.mark.parametrize("mine_is_src", [True, False])
@pytest.mark.parametrize(
    "bad", [range(0, 4, 2), range(-1, 1), range(0, 2**70), range(2**70, 2**70 + 1)], ids=repr
)
@pytest.mark.rule("5.16", "5.20")
def test_layer_ranges_are_refused_before_a_peer_is_asked(check: Any, mine_is_src: bool, bad: range) -> None:
    """On either side; a range too long for ``len`` is no OverflowError."""
    layers = Layers(bad, None) if mine_is_src else Layers(None, bad)
    with pytest.raises(ParamInvalidError, match="_layer_range is range"):
        check(layers=layers)
    with pytest.raises(ParamInvalidError, match="tensor_num_per_layer is 0"):
        check(layers=Layers(None, None, 0))


@pytest.mark.parametrize("check", [pull_cache, pull_blocks, push_cache, push_blocks])
def test_layer_ranges_of_the_own_side(check: Any) -> None:
    mine = "dst" if check in (pull_cache, pull_blocks) else "src"
    check(layers=Layers(**{mine: range(1, 3)}))
    check(layers=Layers(**{mine: range(3, 3)}))
    with pytest.raises(ParamInvalidError, match="3 layers"):
        check(layers=Layers(**{mine: range(1, 4)}))
    with pytest.raises(ParamInvalidError, match="multiple"):
        check(layers=Layers(**{mine: range(0, 1)}, tensors_per_layer=4))


# ---- rows of the fault table -----------------------------------------------------------------------------


def test_b1_the_last_block_is_fine_and_the_next_is_not() -> None:
    src, dst = Layout(2, 113, 4), Layout(2, 211, 4)
    planning.plan_blocks(src, u64(112), dst, u64(210), Layers())
    for blocks, words in (
        ((u64(113), u64(0)), r"src_blocks\[0\] is 113.*113 in dim 0"),
        ((u64(0), u64(211)), r"dst_blocks\[0\] is 211.*211 in dim 0"),
        ((u64(2**63), u64(0)), "src_blocks"),
        ((u64(1, 2), u64(3, 3)), "block 3 more than once"),
    ):
        with pytest.raises(ParamInvalidError, match=words):
            planning.plan_blocks(src, blocks[0], dst, blocks[1], Layers())


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([7, 8], [0, 1], r"src_blocks\[1\] is 8"),
        ([6, 7, 8, 9], [0, 1, 2, 3], r"src_blocks\[2\] is 8"),
        (list(range(9)), [0] * 9, r"src_blocks\[8\] is 8"),
        ([0, 1, 2], [6, 7, 8], r"dst_blocks\[2\] is 8"),
    ],
)
def test_b2_every_index_of_a_run_is_checked(src: list[int], dst: list[int], words: str) -> None:
    with pytest.raises(ParamInvalidError, match=words):
        planning.plan_blocks(Layout(2, 8, 4), u64(*src), Layout(2, 8, 4), u64(*dst), Layers())


def test_b3_each_side_has_its_own_stride() -> None:
    small, large = Layout(1, 8, 64 << 10), Layout(1, 8, 128 << 10)
    for src, dst in ((small, large), (large, small)):
        with pytest.raises(ParamInvalidError, match=rf"{src.stride_nbytes} bytes.*{dst.stride_nbytes}"):
            planning.plan_blocks(src, u64(0), dst, u64(0), Layers())
    src = Layout(1, 4, 100)
    source, target = planning.plan_slot(src, 3, Layout(1, 2, 60), 1, -1, Layers())
    assert ranges_of(source) == [(300, 360)]
    assert ranges_of(target) == [(60, 120)]
    with pytest.raises(ParamInvalidError, match=r"200 bytes.*100 bytes"):
        planning.plan_slot(src, 3, Layout(1, 2, 200), 1, -1, Layers())
    source, target = planning.plan_slot(src, 3, Layout(1, 2, 200), 1, 100, Layers())
    assert ranges_of(source) == [(300, 400)]
    assert ranges_of(target) == [(200, 300)]
    with pytest.raises(ParamInvalidError, match=r"100 bytes.*60"):
        planning.plan_slot_push(src, 0, Layout(1, 2, 60), 0, Layers())


def test_b4_the_tail_of_a_slot() -> None:
    src, dst = Layout(1, 2, 28), Layout(1, 8, 8)
    for batch in (0, 1):
        source, target = planning.plan_slot_to_blocks(src, batch, dst, u64(1, 3, 5, 7), Layers())
        assert ranges_of(source) == [(28 * batch, 28 * batch + 28)]
        assert ranges_of(target) == [(8, 16), (24, 32), (40, 48), (56, 60)]
        source, target = planning.plan_slot_to_blocks(src, batch, dst, u64(1, 3), Layers())
        assert ranges_of(source) == [(28 * batch, 28 * batch + 16)]
        assert ranges_of(target) == [(8, 16), (24, 32)]
        with pytest.raises(ParamInvalidError, match=r"5 destination blocks.*28 bytes.*at most 4"):
            planning.plan_slot_to_blocks(src, batch, dst, u64(0, 1, 2, 3, 4), Layers())


def ranges_of(part: CacheSlice) -> list[tuple[int, int]]:
    extents = part.extents(np.zeros(part.first_tensor + part.tensor_count, dtype=np.uint64))
    return [(o, o + n) for o, n in zip(extents.offsets.tolist(), extents.lengths.tolist(), strict=True)]


def test_y1_one_tensor_per_layer() -> None:
    match = planning.match_tensors
    assert match(Layers(range(3, 4), range(3, 4), 1), 61, 61) == ((3, 1), (3, 1))
    with pytest.raises(ParamInvalidError, match=r"61 tensors.*multiple"):
        match(Layers(range(3, 4), range(3, 4), 2), 61, 61)
    assert match(Layers(), 61, 61) == ((0, 61), (0, 61))
    assert match(Layers(), 1, 1) == ((0, 1), (0, 1))


@pytest.mark.parametrize("per_layer", [0, -2])
def test_a_layer_has_at_least_one_tensor(per_layer: int) -> None:
    """Also where the number comes from a peer."""
    for layers in (None, range(-2, -1), range(0, 1)):
        with pytest.raises(ParamInvalidError, match="at least 1"):
            planning.match_tensors(Layers(layers, layers, per_layer), 4, 4)


@pytest.mark.rule("5.22", "5.23", "5.24", "5.25")
def test_y3_layers_by_position() -> None:
    match = planning.match_tensors
    assert match(Layers(range(0, 4), range(10, 14)), 28, 28) == ((0, 8), (20, 8))
    assert match(Layers(range(2, 4), None), 28, 4) == ((4, 4), (0, 4))
    assert match(Layers(None, range(2, 4)), 4, 28) == ((0, 4), (4, 4))
    assert match(Layers(range(3, 3), range(9, 9)), 28, 28) == ((0, 28), (0, 28))
    for layers, tensors, words in (
        (Layers(range(0, 4), range(0, 3)), (28, 28), "8 tensors at the source against 6"),
        (Layers(range(0, 4, 2), range(0, 2)), (28, 28), "src_layer_range.*step 1"),
        (Layers(range(0, 2), range(0, 4, 2)), (28, 28), "dst_layer_range.*step 1"),
        (Layers(range(-1, 3), range(0, 4)), (28, 28), "src_layer_range"),
        (Layers(range(11, 15), range(0, 4)), (28, 28), "14 layers"),
        (Layers(range(0, 2), None), (28, 28), "4 tensors at the source against 28"),
        (Layers(range(0, 1), None), (4, 3), "3 tensors of the dst"),
        (Layers(None, None), (4, 6), "4 tensors at the source against 6"),
    ):
        with pytest.raises(ParamInvalidError, match=words):
            match(layers, *tensors)
