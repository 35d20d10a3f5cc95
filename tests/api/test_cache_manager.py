"""CacheManager: what each method refuses before the engine hears of it, and what it hands over."""

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
    CacheTask,
    DataType,
    EngineFinalizedError,
    LayerSynchronizer,
    LLMDataDist,
    ParamInvalidError,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist._core.requests import Layers, PullBlocks, PullCache, PushBlocks, PushCache, PushLayers
from tests.api.conftest import Make


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


DESC = CacheDesc(2, [4, 8], DataType.DT_FLOAT16)
CACHE = Cache(1, DESC, [16, 32])
BLOCKS = Cache(2, DESC, [16, 32], True)
KEY, BY_ID, BLOCKS_KEY = CacheKey(2, 3), CacheKeyByIdAndIndex(2, 5, 1), BlocksCacheKey(2)
PLAIN = TransferConfig(2, [64, 128], range(1), 1)
KEYED = TransferWithCacheKeyConfig(BLOCKS_KEY, range(1), range(1, 2), 1)

# Arguments of each method that are right in the mode given; the tables below change one at a time.
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "register_cache": ("0", {"cache_desc": DESC, "addrs": [16, 32], "cache_keys": [KEY]}),
    "register_blocks_cache": ("0", {"cache_desc": DESC, "addrs": [16, 32], "blocks_cache_key": BLOCKS_KEY}),
    "unregister_cache": ("0", {"cache_id": 1}),
    "pull_cache": ("0", {"cache_key": KEY, "cache": CACHE}),
    "pull_blocks": (
        "0",
        {"src_cache_key": BLOCKS_KEY, "dst_cache": BLOCKS, "src_blocks": [0], "dst_blocks": [1]},
    ),
    "push_cache": ("1", {"dst_cache_key": BY_ID, "src_cache": CACHE}),
    "push_blocks": (
        "1",
        {"dst_cache_key": BLOCKS_KEY, "src_cache": BLOCKS, "src_blocks": [0], "dst_blocks": [1]},
    ),
    "transfer_cache_async": (
        "0",
        {"src_cache": CACHE, "layer_synchronizer": Ready(), "transfer_configs": [PLAIN]},
    ),
}

INT32 = [
    ("1", TypeError, "must be an int, not str"),
    (True, TypeError, "not bool"),
    (1.0, TypeError, "not float"),
]
UINT32 = [*INT32, (-1, ValueError, "is -1"), (2**32, ValueError, "is 4294967296")]
INT64 = [
    *INT32,
    (2**63, ValueError, "is 9223372036854775808"),
    (-(2**63) - 1, ValueError, "is -9223372036854775809"),
]
RANGE = [
    ([0, 1], TypeError, "must be range or None, not list"),
    (1, TypeError, "must be range or None, not int"),
]
BLOCK_LIST = [
    (5, TypeError, "must be a list, tuple or NumPy integer array"),
    ("12", TypeError, "must be a list, tuple or NumPy integer array"),
    ([0, True], TypeError, r"\[1\] must be an int, not bool"),
    ([0.0], TypeError, r"\[0\] must be an int, not float"),
    (np.array([0.0]), TypeError, "float64"),
    (np.array([[0]]), TypeError, "2-dim"),
    ([3, -1], ValueError, r"\[1\] is -1"),
    ([2**64], ValueError, r"\[0\] is 18446744073709551616"),
    (np.array([-7]), ValueError, r"\[0\] is -7"),
]
CACHE_ONLY = [(1, TypeError, "must be Cache, not int"), (None, TypeError, "must be Cache, not NoneType")]
ADDRS = [
    (16, TypeError, "must be list or tuple, not int"),
    ([16, "x"], TypeError, r"\[1\] must be an int, not str"),
    ([16, -1], ValueError, r"\[1\] is -1"),
    ([16, 2**64], ValueError, r"\[1\] is 18446744073709551616"),
    ([16], ParamInvalidError, "has 1 addresses; cache_desc has 2 tensors"),
    ([16, 32, 48], ParamInvalidError, "has 3 addresses; cache_desc has 2 tensors"),
    ([16, 0], ParamInvalidError, r"\[1\] is 0; 64 bytes of mapped memory"),
]
DESCS = [
    ((2, [4]), TypeError, "must be CacheDesc, not tuple"),
    (CacheDesc(0, [4], DataType.DT_INT8), ParamInvalidError, "num_tensors is 0"),
]
FLAG = [(1, TypeError, "must be bool or None, not int"), ("1", TypeError, "must be bool or None, not str")]

TABLE: dict[str, dict[str, list[tuple[Any, type[Exception], str]]]] = {
    "register_cache": {
        "cache_desc": DESCS,
        "addrs": ADDRS,
        "cache_keys": [
            (KEY, TypeError, "must be list or tuple, not CacheKey"),
            ([KEY, BLOCKS_KEY], TypeError, r"\[1\] must be CacheKey, not BlocksCacheKey"),
            ([BY_ID], TypeError, r"\[0\] must be CacheKey, not CacheKeyByIdAndIndex"),
            (None, TypeError, "not NoneType"),
        ],
        "remote_accessible": FLAG,
    },
    "register_blocks_cache": {
        "cache_desc": DESCS,
        "addrs": ADDRS,
        "blocks_cache_key": [
            (KEY, TypeError, "must be BlocksCacheKey or None, not CacheKey"),
            ([BLOCKS_KEY], TypeError, "must be BlocksCacheKey or None, not list"),
        ],
        "remote_accessible": FLAG,
    },
    "unregister_cache": {"cache_id": INT64},
    "pull_cache": {
        "cache_key": [
            (BLOCKS_KEY, TypeError, "must be CacheKey or CacheKeyByIdAndIndex, not BlocksCacheKey"),
            (3, TypeError, "not int"),
        ],
        "cache": CACHE_ONLY,
        "batch_index": UINT32,
        "size": INT64,
        "src_layer_range": RANGE,
        "dst_layer_range": RANGE,
        "tensor_num_per_layer": UINT32,
    },
    "pull_blocks": {
        "src_cache_key": [
            (3, TypeError, "must be BlocksCacheKey or CacheKey or CacheKeyByIdAndIndex, not int")
        ],
        "dst_cache": CACHE_ONLY,
        "src_blocks": BLOCK_LIST,
        "dst_blocks": BLOCK_LIST,
        "src_layer_range": RANGE,
        "dst_layer_range": RANGE,
        "tensor_num_per_layer": UINT32,
    },
    "push_cache": {
        "dst_cache_key": [
            (KEY, TypeError, "must be CacheKeyByIdAndIndex, not CacheKey"),
            (BLOCKS_KEY, TypeError, "must be CacheKeyByIdAndIndex, not BlocksCacheKey"),
        ],
        "src_cache": CACHE_ONLY,
        "src_batch_index": UINT32,
        "size": INT64,
        "src_layer_range": RANGE,
        "dst_layer_range": RANGE,
        "tensor_num_per_layer": UINT32,
    },
    "push_blocks": {
        "dst_cache_key": [(BY_ID, TypeError, "must be BlocksCacheKey, not CacheKeyByIdAndIndex")],
        "src_cache": CACHE_ONLY,
        "src_blocks": BLOCK_LIST,
        "dst_blocks": BLOCK_LIST,
        "src_layer_range": RANGE,
        "dst_layer_range": RANGE,
        "tensor_num_per_layer": UINT32,
    },
    "transfer_cache_async": {
        "src_cache": CACHE_ONLY,
        "layer_synchronizer": [
            (lambda layer, timeout: True, TypeError, "must be LayerSynchronizer, not function")
        ],
        "transfer_configs": [
            (PLAIN, TypeError, "must be list or tuple, not TransferConfig"),
            ([PLAIN, 3], TypeError, r"\[1\] must be TransferConfig, not int"),
            ([KEYED], TypeError, r"\[0\] must be TransferConfig, not TransferWithCacheKeyConfig"),
            ([], ParamInvalidError, "is empty"),
        ],
        "src_block_indices": BLOCK_LIST,
        "dst_block_indices": BLOCK_LIST,
        "dst_block_memory_size": [*INT64, (-1, ParamInvalidError, "is -1")],
    },
}

ROWS = [
    (method, name, *row)
    for method, arguments in TABLE.items()
    for name, rows in arguments.items()
    for row in rows
]


@pytest.mark.rule("1.23", "1.24")
@pytest.mark.parametrize(("method", "name", "value", "error", "text"), ROWS)
@pytest.mark.rule(
    "1.23", "1.24", "5.15", "5.18", "5.37", "5.64", "5.66", "5.71", "5.80", "5.85", "6.2", "6.3", "6.4"
)
def test_bad_argument_is_named_and_reaches_no_engine(
    method: str, name: str, value: Any, error: type[Exception], text: str, make: Make
) -> None:
    accessible, right = RIGHT[method]
    dist, engine = make(EnableRemoteCacheAccessible=accessible)
    with pytest.raises(error, match=text) as caught:
        getattr(dist.cache_manager, method)(**{**right, name: value})
    assert type(caught.value) is error
    assert name in str(caught.value)
    assert engine.calls == [("start",)]


@pytest.mark.parametrize("method", RIGHT)
def test_right_arguments_reach_the_engine_once(method: str, make: Make) -> None:
    accessible, right = RIGHT[method]
    dist, engine = make(EnableRemoteCacheAccessible=accessible)
    getattr(dist.cache_manager, method)(**right)
    assert len(engine.calls) == 2


@pytest.mark.rule("1.22")
@pytest.mark.parametrize("method", RIGHT)
def test_e1_state_comes_before_arguments(method: str, make: Make) -> None:
    dist, _ = make()
    manager = dist.cache_manager
    dist.finalize()
    with pytest.raises(EngineFinalizedError):
        getattr(manager, method)(**dict.fromkeys(RIGHT[method][1]))


def manager_of(make: Make, **options: str) -> tuple[Any, Any]:
    made: tuple[LLMDataDist, Any] = make(**options)
    return made[0].cache_manager, made[1]


# ---- what is handed over -------------------------------------------------------------------------------


def test_register(make: Make) -> None:
    manager, engine = manager_of(make)
    cache = manager.register_cache(DESC, (np.uint64(16), 2**64 - 128), [KEY])
    assert engine.calls[-1] == ("register", DESC, (16, 2**64 - 128), (KEY,), False, None)
    assert isinstance(cache, Cache)
    manager.register_cache(DESC, [16, 32], remote_accessible=True)
    assert engine.calls[-1] == ("register", DESC, (16, 32), (), False, True)
    assert manager.register_blocks_cache(DESC, [16, 32]).is_blocks_cache
    assert engine.calls[-1] == ("register", DESC, (16, 32), (), True, None)
    manager.register_blocks_cache(DESC, [16, 32], BLOCKS_KEY, False)
    assert engine.calls[-1] == ("register", DESC, (16, 32), (BLOCKS_KEY,), True, False)
    manager.unregister_cache(np.int64(-1))
    assert engine.calls[-1] == ("unregister", -1)


@pytest.mark.rule("5.19")
def test_pull_cache(make: Make) -> None:
    manager, engine = manager_of(make)
    assert manager.pull_cache(KEY, CACHE) is None
    assert engine.calls[-1] == ("pull", PullCache(KEY, CACHE, 0, -1, Layers()))
    manager.pull_cache(
        BY_ID,
        CACHE,
        np.uint32(2**32 - 1),
        np.int64(7),
        src_layer_range=range(1, 2),
        dst_layer_range=range(0),
        tensor_num_per_layer=1,
    )
    assert engine.calls[-1] == (
        "pull",
        PullCache(BY_ID, CACHE, 2**32 - 1, 7, Layers(range(1, 2), range(0), 1)),
    )
    with pytest.raises(TypeError):
        manager.pull_cache(KEY, CACHE, 0, -1, range(1))


@pytest.mark.rule("5.35")
def test_pull_cache_by_request_key_is_mode_a_only(make: Make) -> None:
    manager, engine = manager_of(make, EnableRemoteCacheAccessible="1")
    with pytest.raises(
        TypeError, match="cache_key must be CacheKeyByIdAndIndex when enable_remote_cache_accessible"
    ):
        manager.pull_cache(KEY, CACHE)
    assert engine.calls == [("start",)]
    manager.pull_cache(BY_ID, CACHE)
    manager.pull_blocks(KEY, BLOCKS, (), [0])
    assert [call[0] for call in engine.calls] == ["start", "pull", "pull"]


def test_pull_blocks(make: Make) -> None:
    manager, engine = manager_of(make)
    manager.pull_blocks(
        BLOCKS_KEY, BLOCKS, [5, 2**64 - 1], np.array([1, 2], dtype=np.int16), src_layer_range=range(3)
    )
    (_, request) = engine.calls[-1]
    assert isinstance(request, PullBlocks)
    assert (request.key, request.cache, request.layers) == (BLOCKS_KEY, BLOCKS, Layers(range(3)))
    assert (request.src_blocks.tolist(), request.dst_blocks.tolist()) == ([5, 2**64 - 1], [1, 2])
    assert request.src_blocks.dtype == request.dst_blocks.dtype == np.uint64
    manager.pull_blocks(KEY, BLOCKS, dst_blocks=(0,))
    assert len(engine.calls[-1][1].src_blocks) == 0


def test_push_cache(make: Make) -> None:
    manager, engine = manager_of(make, EnableRemoteCacheAccessible="1")
    manager.push_cache(BY_ID, CACHE, 1, range(1), range(1, 2), -1, 1)
    assert engine.calls[-1] == ("push", PushCache(BY_ID, CACHE, 1, -1, Layers(range(1), range(1, 2), 1)))
    manager.push_cache(BY_ID, CACHE)
    assert engine.calls[-1] == ("push", PushCache(BY_ID, CACHE, 0, -1, Layers()))


def test_push_blocks(make: Make) -> None:
    manager, engine = manager_of(make, EnableRemoteCacheAccessible="1")
    manager.push_blocks(BLOCKS_KEY, BLOCKS, [1], [2], range(1), range(1, 2), 1)
    (_, request) = engine.calls[-1]
    assert isinstance(request, PushBlocks)
    assert (request.key, request.cache, request.layers) == (
        BLOCKS_KEY,
        BLOCKS,
        Layers(range(1), range(1, 2), 1),
    )
    assert (request.src_blocks.tolist(), request.dst_blocks.tolist()) == ([1], [2])


@pytest.mark.rule("5.97")
def test_transfer_hands_over_copies(make: Make) -> None:
    manager, engine = manager_of(make)
    ready, config = Ready(), TransferConfig(2, [64, 128], range(1), 1)
    task = manager.transfer_cache_async(CACHE, ready, [config], [1], np.array([2]), 64)
    assert isinstance(task, CacheTask)
    (_, request) = engine.calls[-1]
    assert isinstance(request, PushLayers)
    assert (request.cache, request.synchronizer, request.dst_block_nbytes) == (CACHE, ready, 64)
    assert request.src_blocks is not None
    assert request.dst_blocks is not None
    assert (request.src_blocks.tolist(), request.dst_blocks.tolist()) == ([1], [2])
    (copied,) = request.configs
    assert isinstance(copied, TransferConfig)
    config.dst_addrs = [1]
    config.src_batch_index = 9
    assert (copied.dst_cluster_id, copied.dst_addrs, copied.src_layer_range, copied.src_batch_index) == (
        2,
        [64, 128],
        range(1),
        1,
    )
    manager.transfer_cache_async(CACHE, ready, (PLAIN, PLAIN))
    (_, request) = engine.calls[-1]
    assert (len(request.configs), request.src_blocks, request.dst_blocks) == (2, None, None)
    assert request.dst_block_nbytes is None


@pytest.mark.rule("5.96")
def test_addresses_edited_in_place_are_checked_again(make: Make) -> None:
    manager, engine = manager_of(make)
    config = TransferConfig(2, [64, 128])
    config.dst_addrs.append("x")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"dst_addrs\[2\] must be an int, not str"):
        manager.transfer_cache_async(CACHE, Ready(), [config])
    assert engine.calls == [("start",)]


@pytest.mark.rule("5.85")
def test_transfer_by_key_in_mode_b(make: Make) -> None:
    manager, engine = manager_of(make, EnableRemoteCacheAccessible="1")
    with pytest.raises(
        TypeError, match=r"transfer_configs\[0\] must be TransferWithCacheKeyConfig, not TransferConfig"
    ):
        manager.transfer_cache_async(CACHE, Ready(), [PLAIN])
    manager.transfer_cache_async(CACHE, Ready(), [KEYED])
    (copied,) = engine.calls[-1][1].configs
    assert copied is not KEYED
    assert (copied.cache_key, copied.src_layer_range, copied.dst_layer_range, copied.src_batch_index) == (
        BLOCKS_KEY,
        range(1),
        range(1, 2),
        1,
    )
