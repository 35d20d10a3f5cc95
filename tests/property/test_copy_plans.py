"""§6 copies within a process: plans against plain NumPy, and everything that they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._core.copy_plans import Memory, plan_copy_blocks, plan_copy_cache, plan_swap_blocks
from llm_datadist._core.layout import Layout
from llm_datadist._core.requests import CopyBlocks, CopyCache, SwapBlocks
from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.enums import Placement
from llm_datadist.status import ParamInvalidError
from tests.support.streams import addresses_of

CACHE = Cache(1, CacheDesc(1, [1], DataType.DT_INT8), [1])  # plans look at the Memory, never at the handle
HOST, DEVICE = Placement.HOST, Placement.DEVICE


def memory(
    name: str, tensors: int = 2, dim0: int = 4, stride: int = 8, *, at: int = 0, blocks: bool = True,
    placement: Placement = DEVICE,
) -> Memory:  # fmt: skip
    layout = Layout(tensors, dim0, stride)
    addresses = at + np.arange(tensors, dtype=np.uint64) * np.uint64(layout.tensor_nbytes + 3)
    return Memory(name, layout, addresses.astype(np.uint64), blocks, placement)


def u64(*numbers: int) -> U64:
    return np.array(numbers, dtype=np.uint64)


def run(world: np.ndarray, plan: Segments) -> None:  # type: ignore[type-arg]
    assert isinstance(plan.source, Extents)
    for src, dst in zip(addresses_of(plan.source), addresses_of(plan.destination), strict=True):
        world[dst] = world[src]


def random_world(seed: int = 1, nbytes: int = 4096) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@given(
    pairs=st.dictionaries(st.integers(0, 6), st.integers(0, 6)),
    tensors=st.integers(1, 5),
    stride=st.integers(1, 9),
    buffer=st.integers(0, 100),
)
@pytest.mark.rule("6.85")
def test_copy_blocks_is_as_if_all_reads_came_first(
    pairs: dict[int, int], tensors: int, stride: int, buffer: int
) -> None:
    dst, src = list(pairs), list(pairs.values())  # destinations are distinct, sources may repeat
    cache = memory("cache 1", tensors, 7, stride)
    world = random_world()
    want = world.copy()
    for base in cache.addresses.tolist():
        rows, old = (w[base : base + 7 * stride].reshape(7, stride) for w in (want, world))
        rows[dst] = old[src]
    moved = [(s, d) for s, d in zip(src, dst, strict=True) if s != d]
    for step in plan_copy_blocks(CopyBlocks(CACHE, u64(*src), u64(*src), u64(*dst)), cache, buffer):
        assert step.saved.nbytes == step.restored.nbytes
        assert step.saved.nbytes <= max(buffer, len(moved) * stride)
        kept = world[addresses_of(step.saved)].copy()
        run(world, step.direct)
        world[addresses_of(step.restored)] = kept
    assert np.array_equal(world, want)


@given(st.data())
@pytest.mark.rule("6.79", "6.80", "6.81")
def test_copy_cache_copies_those_bytes_and_no_others(data: st.DataObject) -> None:
    src = memory("cache 1", 3, 4, data.draw(st.integers(1, 9)), blocks=False)
    dst = memory("cache 2", 3, 2, data.draw(st.integers(1, 9)), at=1000, blocks=False)
    offset, size = data.draw(st.integers(-1, 10)), data.draw(st.integers(-2, 10))
    request = CopyCache(
        CACHE, CACHE, data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3)), offset, size
    )
    a, b = src.layout.stride_nbytes, dst.layout.stride_nbytes
    nbytes = a - offset if size == -1 else size
    if offset < 0 or nbytes < 1 or offset + nbytes > min(a, b):
        with pytest.raises(ParamInvalidError, match=r"cache 1 has .* bytes, one of cache 2"):
            plan_copy_cache(request, src, dst)
        return
    world = random_world()
    want = world.copy()
    for there, here in zip(src.addresses.tolist(), dst.addresses.tolist(), strict=True):
        at, to = there + request.src_batch_index * a + offset, here + request.dst_batch_index * b + offset
        want[to : to + nbytes] = world[at : at + nbytes]
    run(world, plan_copy_cache(request, src, dst))
    assert np.array_equal(world, want)


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 5)), st.booleans())
@pytest.mark.rule("6.90")
def test_swap_blocks_copies_one_to_one(pairs: dict[int, int], to_host: bool) -> None:
    src = memory("cache 1", 2, 6, 5, placement=DEVICE if to_host else HOST)
    dst = memory("cache 2", 2, 4, 5, at=1000, placement=HOST if to_host else DEVICE)
    world = random_world()
    want = world.copy()
    for there, here in zip(src.addresses.tolist(), dst.addresses.tolist(), strict=True):
        for to, at in pairs.items():
            want[here + to * 5 : here + to * 5 + 5] = world[there + at * 5 : there + at * 5 + 5]
    plan = plan_swap_blocks(SwapBlocks(CACHE, CACHE, u64(*pairs.values()), u64(*pairs)), src, dst)
    run(world, plan)
    assert np.array_equal(world, want)


SLOTS, OTHER_SLOTS = memory("cache 1", blocks=False), memory("cache 2", at=1000, blocks=False)
BLOCKS = memory("cache 3")


@pytest.mark.parametrize(
    ("src", "dst", "batches", "text"),
    [
        (BLOCKS, SLOTS, (0, 0), "src is cache 3, a blocks cache; .* use copy_blocks"),
        (SLOTS, BLOCKS, (0, 0), "dst is cache 3, a blocks cache"),
        (SLOTS, memory("cache 4", 3, blocks=False), (0, 0), "cache 1 has 2 tensors, cache 4 3"),
        (SLOTS, OTHER_SLOTS, (4, 0), r"dst_batch_index is 4, but cache 2 has 4 slots \(0..3\)"),
        (SLOTS, OTHER_SLOTS, (0, 4), "src_batch_index is 4, but cache 1"),
        (SLOTS, SLOTS, (1, 1), "overlaps .* same memory"),
        (SLOTS, memory("cache 5", at=12, blocks=False), (0, 1), "cache 5 overlaps the source in cache 1"),
    ],
)
@pytest.mark.rule("5.136", "6.77", "6.78")
def test_copy_cache_refuses(src: Memory, dst: Memory, batches: tuple[int, int], text: str) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        plan_copy_cache(CopyCache(CACHE, CACHE, *batches, 0, -1), src, dst)


def test_a_slot_of_one_cache_goes_to_another_slot_of_it() -> None:
    assert plan_copy_cache(CopyCache(CACHE, CACHE, 1, 0, 0, -1), SLOTS, SLOTS).nbytes == 16


@pytest.mark.parametrize(
    ("cache", "src", "dst", "text"),
    [
        (SLOTS, [0], [1], "cache 1 is not a blocks cache; .* use copy_cache"),
        (BLOCKS, [0, 4], [1, 2], r"source\[1\] is 4, .* has 4 in dim 0"),
        (BLOCKS, [2**64 - 1], [1], r"source\[0\] is 18446744073709551615"),
        (BLOCKS, [0, 1], [1, 4], r"destination\[1\] is 4"),
        (BLOCKS, [0, 1], [3, 3], "destination names block 3 more than once"),
    ],
)
@pytest.mark.rule("6.82", "6.83")
def test_copy_blocks_refuses_before_the_first_step(
    cache: Memory, src: list[int], dst: list[int], text: str
) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        plan_copy_blocks(CopyBlocks(CACHE, u64(*src), u64(*src), u64(*dst)), cache, 100)


@pytest.mark.rule("6.83")
def test_copy_blocks_checks_a_source_without_destinations_too() -> None:
    with pytest.raises(ParamInvalidError, match=r"source\[1\] is 99"):
        plan_copy_blocks(CopyBlocks(CACHE, u64(0, 99), u64(0), u64(1)), BLOCKS, 100)


def host(name: str = "cache 9", at: int = 2000, **how: int) -> Memory:
    return memory(name, at=at, placement=HOST, **how)


@pytest.mark.parametrize(
    ("src", "dst", "blocks", "text"),
    [
        (SLOTS, host(), ([0], [0]), "src is cache 1, not a blocks cache"),
        (host(), SLOTS, ([0], [0]), "dst is cache 1, not a blocks cache"),
        (BLOCKS, memory("cache 4", at=1000), ([0], [0]), r"has placement DEVICE and dst \(cache 4\) DEVICE"),
        (host("cache 4", 0), host(), ([0], [0]), "HOST and dst .* HOST"),
        (BLOCKS, host(tensors=1), ([0], [0]), "cache 3 has 2 tensors, cache 9 1"),
        (BLOCKS, host(stride=9), ([0], [0]), "a block of cache 3 has 8 bytes, one of cache 9 9"),
        (BLOCKS, host(dim0=2), ([4], [0]), r"source\[0\] is 4, .* has 4 in dim 0"),
        (BLOCKS, host(dim0=2), ([3], [2]), r"destination\[0\] is 2, .* has 2 in dim 0"),
        (BLOCKS, host(), ([0, 1], [2, 2]), "destination names block 2 more than once"),
        (BLOCKS, host(at=4), ([0], [0]), "overlaps"),
    ],
)  # fmt: skip
@pytest.mark.rule("6.86", "6.87", "6.88", "6.89")
def test_swap_blocks_refuses(
    src: Memory, dst: Memory, blocks: tuple[list[int], list[int]], text: str
) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        plan_swap_blocks(SwapBlocks(CACHE, CACHE, u64(*blocks[0]), u64(*blocks[1])), src, dst)
