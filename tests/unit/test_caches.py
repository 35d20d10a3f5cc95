"""Descriptions, keys and handles: what they take, refuse and show."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist.caches import Cache, CacheDesc, KvCache, MemInfo
from llm_datadist.data_type import DataType
from llm_datadist.enums import Memtype, Placement
from llm_datadist.keys import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import LLMStatusCode, ParamInvalidError

F16 = DataType.DT_FLOAT16


def desc(shape: Any = (4, 8), **others: Any) -> CacheDesc:
    return CacheDesc(**{"num_tensors": 2, "shape": shape, "data_type": F16, **others})


@pytest.mark.rule("2.1", "2.2", "2.3", "2.5", "2.13", "2.15")
def test_desc_properties() -> None:
    d = CacheDesc(
        3, [2, 5, 7], F16, Placement.HOST, batch_dim_index=1, seq_len_dim_index=2, kv_tensor_format="ND"
    )
    assert (d.num_tensors, d.shape, d.data_type, d.placement) == (3, [2, 5, 7], F16, Placement.HOST)
    assert (d.batch_dim, d.batch_size, d.seq_len_dim_index, d.kv_tensor_format) == (1, 5, 2, "ND")
    assert d.size == 2 * 5 * 7 * 2
    defaults = desc()
    assert (defaults.placement, defaults.batch_dim, defaults.seq_len_dim_index) == (Placement.DEVICE, 0, -1)
    assert (defaults.kv_tensor_format, defaults.shape) == (None, (4, 8))
    assert "num_tensors=2, shape=(4, 8)" in repr(defaults)


@pytest.mark.rule("2.1")
def test_desc_arguments_and_defaults() -> None:
    found = {name: p.default for name, p in inspect.signature(CacheDesc).parameters.items()}
    needed = inspect.Parameter.empty
    assert list(found.items()) == [
        ("num_tensors", needed),
        ("shape", needed),
        ("data_type", needed),
        ("placement", Placement.DEVICE),
        ("batch_dim_index", 0),
        ("seq_len_dim_index", -1),
        ("kv_tensor_format", None),
    ]


def test_desc_is_not_changed_through_its_shape() -> None:
    given = [2, 3]
    d = desc(given)
    given[0] = 9
    d.shape[1] = 9  # type: ignore[index]
    assert d.shape == [2, 3]


@pytest.mark.rule("2.4")
def test_update_dim() -> None:
    d = desc([4, 8])
    before = copy.copy(d)
    d.update_dim(0, np.int64(6))
    assert (d.shape, d.size, d.batch_size) == ([6, 8], 96, 6)
    assert before.shape == [4, 8]
    with pytest.raises(ParamInvalidError, match="index is 2"):
        d.update_dim(2, 1)
    with pytest.raises(TypeError, match="value must be an int, not float"):
        d.update_dim(0, 1.0)  # type: ignore[arg-type]


@pytest.mark.rule("2.5", "2.6", "2.9", "2.10", "2.11")
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_tensors": -1}, ValueError, "num_tensors is -1"),
        ({"num_tensors": 2**32}, ValueError, "num_tensors is 4294967296"),
        ({"num_tensors": True}, TypeError, "num_tensors must be an int, not bool"),
        ({"shape": 5}, TypeError, "shape must be list or tuple, not int"),
        ({"shape": np.array([1, 2])}, TypeError, "shape must be list or tuple, not ndarray"),
        ({"shape": [2, 1.5]}, TypeError, r"shape\[1\] must be an int, not float"),
        ({"shape": [2**63]}, ValueError, r"shape\[0\] is 9223372036854775808"),
        ({"shape": []}, ParamInvalidError, "shape has 0 dims"),
        ({"shape": [1] * 32}, ParamInvalidError, "shape has 32 dims; 1 to 31"),
        ({"data_type": 1}, TypeError, "data_type must be DataType, not int"),
        ({"placement": 0}, TypeError, "placement must be Placement, not int"),
        ({"batch_dim_index": 2}, ParamInvalidError, r"batch_dim_index is 2; .*\[0, 2\)"),
        ({"batch_dim_index": -1}, ParamInvalidError, "batch_dim_index is -1"),
        ({"seq_len_dim_index": 2}, ParamInvalidError, r"seq_len_dim_index is 2; .*\[-1, 2\)"),
        ({"seq_len_dim_index": -2}, ParamInvalidError, "seq_len_dim_index is -2"),
        ({"kv_tensor_format": 3}, TypeError, "kv_tensor_format must be str or None"),
    ],
)
def test_desc_refuses(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        desc(**arguments)
    assert type(caught.value) is error


@pytest.mark.rule("2.6")
@pytest.mark.parametrize("shape", [[1] * 31, [0, 2], [-1, 2], [2**40, 2**40]])
def test_desc_with_a_dim_still_open_can_be_made(shape: list[int]) -> None:
    assert desc(shape).shape == shape


@pytest.mark.rule("2.7", "2.8")
@pytest.mark.parametrize(
    ("shape", "text"),
    [([2, 0], r"shape\[1\] of \[2, 0\] is 0"), ([-1], r"shape\[0\] of \[-1\] is -1"), ([2**62, 1], "bytes")],
)
def test_check_shape_refuses_what_cannot_be_registered(shape: list[int], text: str) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        desc(shape).check_shape()
    desc([2**61, 1]).check_shape()


KEYS: list[tuple[Callable[..., Any], tuple[int, ...], str]] = [
    (
        CacheKey,
        (2**64 - 1, 2**63 + 1, 5, 6),
        "CacheKey(cluster_id=18446744073709551615, req_id=9223372036854775809, ",
    ),
    (CacheKeyByIdAndIndex, (1, -1, 3), "CacheKeyByIdAndIndex(cluster_id=1, cache_id=-1, batch_index=3)"),
    (BlocksCacheKey, (1, 2), "BlocksCacheKey(cluster_id=1, model_id=2)"),
]


@pytest.mark.rule("2.17", "2.19", "2.21", "2.23", "2.24", "2.25")
@pytest.mark.parametrize(("make", "values", "shown"), KEYS)
def test_keys_are_values(make: Callable[..., Any], values: tuple[int, ...], shown: str) -> None:
    key = make(*values)
    assert repr(key).startswith(shown)
    assert key == make(*map(np.uint64, values)) if min(values) >= 0 else key == make(*values)
    assert hash(key) == hash(make(*values))
    assert {key: 1}[make(*values)] == 1
    assert key.prompt_cluster_id == key.cluster_id == values[0]
    assert key == make(
        prompt_cluster_id=values[0], **dict(zip(list(key.__slots__)[1:], values[1:], strict=True))
    )
    for i in range(len(values)):
        assert key != make(*(*values[:i], 77, *values[i + 1 :]))
    assert pickle.loads(pickle.dumps(key)) == key
    assert copy.copy(key) == key
    with pytest.raises(AttributeError):
        key.cluster_id = 3


@pytest.mark.rule("2.26")
@pytest.mark.parametrize(("make", "values", "shown"), KEYS)
def test_keys_have_their_properties(make: Callable[..., Any], values: tuple[int, ...], shown: str) -> None:
    names = {
        CacheKey: ("cluster_id", "req_id", "model_id", "prefix_id"),
        CacheKeyByIdAndIndex: ("cluster_id", "cache_id", "batch_index"),
        BlocksCacheKey: ("cluster_id", "model_id"),
    }[make]  # type: ignore[index]
    key = make(**dict(zip(names, values, strict=True)))
    assert key == make(*values), "by keyword as by position"
    assert tuple(getattr(key, name) for name in names) == values
    assert key.prompt_cluster_id == values[0]


@pytest.mark.rule("2.25")
def test_kinds_of_keys_are_never_equal() -> None:
    assert CacheKeyByIdAndIndex(1, 2) != BlocksCacheKey(1, 2)


@pytest.mark.rule("2.18", "2.23", "2.24")
def test_key_defaults() -> None:
    assert (CacheKey(1, 2).model_id, CacheKey(1, 2).prefix_id) == (0, INVALID_ID)
    assert CacheKeyByIdAndIndex(1, 2).batch_index == 0
    assert BlocksCacheKey(1).model_id == 0


@pytest.mark.rule("2.22")
@pytest.mark.parametrize(
    ("make", "args", "names", "error", "text"),
    [
        (CacheKey, (), {}, ParamInvalidError, "CacheKey needs cluster_id"),
        (CacheKey, (1,), {}, ParamInvalidError, "CacheKey needs req_id"),
        (CacheKey, (), {"req_id": 1}, ParamInvalidError, "CacheKey needs cluster_id"),
        (CacheKey, (1, 2), {"modelid": 1}, ParamInvalidError, "no argument 'modelid'"),
        (CacheKey, (1, 2), {"prompt_cluster_id": 1}, ParamInvalidError, "not both"),
        (CacheKey, (1, -1), {}, ValueError, "req_id is -1"),
        (CacheKey, (1, 2**64), {}, ValueError, "req_id is 18446744073709551616"),
        (CacheKey, (None, 2), {}, TypeError, "cluster_id must be an int, not NoneType"),
        (CacheKey, (1, True), {}, TypeError, "req_id must be an int, not bool"),
        (CacheKey, (1, 2), {"model_id": 0.0}, TypeError, "model_id must be an int, not float"),
        (CacheKey, (1, 2), {"prefix_id": -5}, ValueError, "prefix_id is -5"),
        (CacheKeyByIdAndIndex, (1,), {}, ParamInvalidError, "needs cache_id"),
        (CacheKeyByIdAndIndex, (1, 2**63), {}, ValueError, "cache_id is 9223372036854775808"),
        (CacheKeyByIdAndIndex, (1, 2, -1), {}, ValueError, "batch_index is -1"),
        (CacheKeyByIdAndIndex, (1, 2, 2**32), {}, ValueError, "batch_index is 4294967296"),
        (CacheKeyByIdAndIndex, (1, 2), {"req_id": 1}, ParamInvalidError, "no argument 'req_id'"),
        (BlocksCacheKey, (), {}, ParamInvalidError, "needs cluster_id"),
        (BlocksCacheKey, ("1",), {}, TypeError, "cluster_id must be an int, not str"),
        (BlocksCacheKey, (1, -1), {}, ValueError, "model_id is -1"),
    ],
)
def test_keys_refuse(
    make: Callable[..., Any], args: tuple[Any, ...], names: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        make(*args, **names)
    assert type(caught.value) is error


@pytest.mark.rule("2.29", "2.30", "2.34")
def test_cache_handle() -> None:
    d = desc()
    cache = Cache(7, d, [16, 2**64 - 1], True, life="a life")
    assert (cache.cache_id, cache.cache_desc, cache.is_blocks_cache) == (7, d, True)
    assert (cache.tensor_addrs, cache.per_device_tensor_addrs) == ([16, 2**64 - 1], [[16, 2**64 - 1]])
    cache.tensor_addrs.append(3)
    assert len(cache.tensor_addrs) == 2
    assert cache._life == "a life"
    assert KvCache is Cache
    assert "cache_id=7, blocks" in repr(cache)


@pytest.mark.rule("2.31", "2.32", "2.33")
def test_cpu_cache() -> None:
    cache = Cache.create_cpu_cache(desc(placement=Placement.HOST), [16, 32])
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs, cache._life) == (
        -1,
        True,
        [16, 32],
        None,
    )
    with pytest.raises(ParamInvalidError, match="needs placement HOST; the desc has DEVICE") as caught:
        Cache.create_cpu_cache(desc(), [16, 32])
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(ParamInvalidError, match="addrs has 1 addresses; the desc has 2 tensors"):
        Cache.create_cpu_cache(desc(placement=Placement.HOST), [16])
    with pytest.raises(TypeError, match="addrs must be list or tuple"):
        Cache.create_cpu_cache(desc(placement=Placement.HOST), 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache_desc must be CacheDesc"):
        Cache.create_cpu_cache(3, [16])  # type: ignore[arg-type]


@pytest.mark.rule("6.99")
def test_mem_info() -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, np.uint64(16), 32)  # type: ignore[arg-type]
    assert info == MemInfo(Memtype.MEM_TYPE_DEVICE, 16, 32)
    assert type(info.addr) is int
    with pytest.raises(TypeError, match="mem_type must be Memtype"):
        MemInfo(0, 16, 32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="addr is -1"):
        MemInfo(Memtype.MEM_TYPE_HOST, -1, 32)
