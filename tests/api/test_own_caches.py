"""CacheManager §6: what pools, copies and remapping refuse before the engine hears of it, and what they hand over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    EngineFinalizedError,
    LLMStatusCode,
    MemInfo,
    Memtype,
    ParamInvalidError,
    Placement,
    PoolInfo,
)
from llm_datadist._core.requests import CopyBlocks, CopyCache, SwapBlocks
from tests.api.conftest import Make
from tests.api.test_cache_manager import CACHE_ONLY, DESCS, INT64, UINT32

Rows = list[tuple[Any, type[Exception], str]]

DESC = CacheDesc(2, [4, 8], DataType.DT_FLOAT16)
HOST_DESC = CacheDesc(2, [4, 8], DataType.DT_FLOAT16, Placement.HOST)
CACHE = Cache(1, DESC, [16, 32])
BLOCKS = Cache(2, DESC, [16, 32], True)
CPU = Cache.create_cpu_cache(HOST_DESC, [48, 64])
KEY, BY_ID, BLOCKS_KEY = CacheKey(2, 3), CacheKeyByIdAndIndex(2, 5, 1), BlocksCacheKey(2)
MEMORY = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64)

RIGHT: dict[str, dict[str, Any]] = {
    "allocate_cache": {"cache_desc": DESC, "cache_keys": [KEY]},
    "allocate_blocks_cache": {"cache_desc": DESC, "blocks_cache_key": BLOCKS_KEY},
    "deallocate_cache": {"cache": CACHE},
    "deallocate_blocks_cache": {"cache": BLOCKS},
    "remove_cache_key": {"cache_key": KEY},
    "pool_info": {"placement": Placement.HOST},
    "copy_cache": {"dst": CACHE, "src": CACHE, "dst_batch_index": 1, "req_id": 2**64 - 1},
    "copy_blocks": {"cache": BLOCKS, "copy_block_info": {0: [1, 2]}},
    "swap_blocks": {"src": CPU, "dst": BLOCKS, "src_to_dst": {0: 1}},
    "remap_registered_memory": {"mem_infos": [MEMORY]},
}

KEYS: Rows = [
    (KEY, TypeError, "must be list or tuple, not CacheKey"),
    ([KEY, BLOCKS_KEY], TypeError, r"cache_keys\[1\] must be CacheKey, not BlocksCacheKey"),
    (None, TypeError, "not NoneType"),
]
NOT_A_DICT: Rows = [
    ([(0, 1)], TypeError, "must be dict, not list"),
    (None, TypeError, "must be dict, not NoneType"),
]
TABLE: dict[str, dict[str, Rows]] = {
    "allocate_cache": {"cache_desc": DESCS, "cache_keys": KEYS},
    "allocate_blocks_cache": {
        "cache_desc": DESCS,
        "blocks_cache_key": [
            (KEY, TypeError, "must be BlocksCacheKey or None, not CacheKey"),
            ([BLOCKS_KEY], TypeError, "must be BlocksCacheKey or None, not list"),
        ],
    },
    "deallocate_cache": {"cache": CACHE_ONLY},
    "deallocate_blocks_cache": {"cache": CACHE_ONLY},
    "remove_cache_key": {
        "cache_key": [
            (BY_ID, TypeError, "must be CacheKey, not CacheKeyByIdAndIndex"),
            (BLOCKS_KEY, TypeError, "must be CacheKey, not BlocksCacheKey"),
            (None, TypeError, "must be CacheKey, not NoneType"),
        ]
    },
    "pool_info": {
        "placement": [(0, TypeError, "must be Placement, not int"), ("HOST", TypeError, "not str")]
    },
    "copy_cache": {
        "dst": CACHE_ONLY,
        "src": CACHE_ONLY,
        "dst_batch_index": UINT32,
        "src_batch_index": UINT32,
        "offset": INT64,
        "size": INT64,
        "req_id": [
            ("1", TypeError, "must be an int, not str"),
            (True, TypeError, "not bool"),
            (-1, ValueError, "is -1"),
            (2**64, ValueError, "is 18446744073709551616"),
        ],
    },
    "copy_blocks": {
        "cache": CACHE_ONLY,
        "copy_block_info": [
            *NOT_A_DICT,
            ({"0": [1]}, TypeError, r"copy_block_info\[0\] must be an int, not str"),
            ({True: [1]}, TypeError, "must be an int, not bool"),
            ({0: 1}, TypeError, r"copy_block_info\[0\] must be a list, tuple or NumPy integer array"),
            ({0: [1.0]}, TypeError, "must be an int, not float"),
            ({-1: [1]}, ValueError, "is -1"),
            ({0: [1], 5: [2**64]}, ValueError, r"copy_block_info\[5\]\[0\] is 18446744073709551616"),
            ({2**64: [1]}, ValueError, "is 18446744073709551616"),
        ],
    },
    "swap_blocks": {
        "src": CACHE_ONLY,
        "dst": CACHE_ONLY,
        "src_to_dst": [
            *NOT_A_DICT,
            ({"0": 1}, TypeError, r"src_to_dst\[0\] must be an int, not str"),
            ({0: [1]}, TypeError, r"src_to_dst.values\(\)\[0\] must be an int, not list"),
            ({0: True}, TypeError, "must be an int, not bool"),
            ({0: 1.0}, TypeError, "must be an int, not float"),
            ({-1: 0}, ValueError, "is -1"),
            ({0: -1}, ValueError, "is -1"),
            ({0: 2**64}, ValueError, "is 18446744073709551616"),
        ],
    },
    "remap_registered_memory": {
        "mem_infos": [
            (3, TypeError, "must be list or tuple, not int"),
            (None, TypeError, "not NoneType"),
            ([MEMORY, 3], TypeError, r"mem_infos\[1\] must be MemInfo, not int"),
            ([], ParamInvalidError, "mem_infos is empty"),
        ]
    },
}
ROWS = [
    (method, name, *row)
    for method, arguments in TABLE.items()
    for name, rows in arguments.items()
    for row in rows
]


@pytest.mark.rule("1.23")
@pytest.mark.parametrize(("method", "name", "value", "error", "text"), ROWS)
@pytest.mark.rule("1.23", "6.38", "6.93")
def test_bad_argument_is_named_and_reaches_no_engine(
    method: str, name: str, value: Any, error: type[Exception], text: str, make: Make
) -> None:
    dist, engine = make()
    with pytest.raises(error, match=text) as caught:
        getattr(dist.cache_manager, method)(**{**RIGHT[method], name: value})
    assert type(caught.value) is error
    assert name in str(caught.value)
    if isinstance(caught.value, ParamInvalidError):
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert engine.calls == [("start",)]


def test_every_argument_has_rows() -> None:
    for method, right in RIGHT.items():
        assert set(right) <= set(TABLE[method])


@pytest.mark.parametrize("method", RIGHT)
def test_right_arguments_reach_the_engine_once(method: str, make: Make) -> None:
    dist, engine = make()
    getattr(dist.cache_manager, method)(**RIGHT[method])
    assert len(engine.calls) == 2


@pytest.mark.rule("1.22")
@pytest.mark.parametrize("method", [*RIGHT, "caches"])
def test_e1_state_comes_before_arguments(method: str, make: Make) -> None:
    dist, _ = make()
    manager = dist.cache_manager
    dist.finalize()
    with pytest.raises(EngineFinalizedError):
        getattr(manager, method)(**dict.fromkeys(RIGHT.get(method, {})))


def last(make: Make, method: str, *arguments: Any, **named: Any) -> Any:
    """What the engine is handed."""
    dist, engine = make()
    getattr(dist.cache_manager, method)(*arguments, **named)
    call = engine.calls[-1]
    dist.finalize()
    return call


def test_pools_are_handed_over(make: Make) -> None:
    assert last(make, "allocate_cache", DESC) == ("allocate", DESC, (), False)
    assert last(make, "allocate_cache", DESC, (KEY, KEY)) == ("allocate", DESC, (KEY, KEY), False)
    assert last(make, "allocate_blocks_cache", DESC) == ("allocate", DESC, (), True)
    assert last(make, "allocate_blocks_cache", DESC, BLOCKS_KEY) == ("allocate", DESC, (BLOCKS_KEY,), True)
    assert last(make, "deallocate_cache", CACHE) == ("deallocate", CACHE, False)
    assert last(make, "deallocate_blocks_cache", CACHE) == ("deallocate", CACHE, True)
    assert last(make, "remove_cache_key", KEY) == ("remove_key", KEY)
    dist, engine = make()
    assert isinstance(dist.cache_manager.pool_info(Placement.DEVICE), PoolInfo)
    assert engine.calls[-1] == ("pool_info", Placement.DEVICE)
    assert dist.cache_manager.caches() == []


@pytest.mark.rule("6.76")
def test_copies_are_handed_over(make: Make) -> None:
    assert last(make, "copy_cache", CACHE, BLOCKS) == ("copy", CopyCache(CACHE, BLOCKS, 0, 0, 0, -1))
    wanted = CopyCache(CACHE, CACHE, 1, 2, 3, 4)
    assert last(make, "copy_cache", CACHE, CACHE, 1, np.uint8(2), np.int64(3), 4, 5) == ("copy", wanted)
    _, blocks = last(
        make, "copy_blocks", BLOCKS, {np.int32(7): [1, 2], 3: (), 5: np.array([2**63], np.uint64)}
    )
    assert isinstance(blocks, CopyBlocks)
    assert (blocks.src_blocks.tolist(), blocks.dst_blocks.tolist()) == ([7, 7, 5], [1, 2, 2**63])
    assert blocks.named_blocks.tolist() == [7, 3, 5]
    _, empty = last(make, "copy_blocks", BLOCKS, {})
    assert (len(empty.src_blocks), empty.src_blocks.dtype, empty.dst_blocks.dtype) == (
        0,
        np.uint64,
        np.uint64,
    )
    _, swap = last(make, "swap_blocks", CPU, BLOCKS, {4: 5, 2: np.int64(1)})
    assert isinstance(swap, SwapBlocks)
    assert (swap.src, swap.dst) == (CPU, BLOCKS)
    assert (swap.src_blocks.tolist(), swap.dst_blocks.tolist()) == ([4, 2], [5, 1])


@pytest.mark.rule("6.94")
def test_ranges_are_handed_over(make: Make) -> None:
    other = MemInfo(Memtype.MEM_TYPE_HOST, 1, 1)
    assert last(make, "remap_registered_memory", MEMORY) == ("remap", (MEMORY,))
    assert last(make, "remap_registered_memory", [MEMORY, other]) == ("remap", (MEMORY, other))
