"""Sizes of caches, slices as memory, and the check of a slice that a peer named."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core.layout import CacheSlice, Layout, check_slice
from llm_datadist.caches import CacheDesc
from llm_datadist.data_type import DataType
from llm_datadist.status import ParamInvalidError
from tests.support.streams import addresses_of


@pytest.mark.rule("2.15", "2.16")
@pytest.mark.parametrize(
    ("shape", "kind", "stride"),
    [([5], DataType.DT_INT8, 1), ([4, 2, 3], DataType.DT_FLOAT16, 12), ((3, 7), DataType.DT_STRING, 112)],
)
def test_stride_is_tensor_bytes_by_dim_0(shape: Any, kind: DataType, stride: int) -> None:
    layout = Layout.of(CacheDesc(9, shape, kind, batch_dim_index=len(shape) - 1))
    assert layout == Layout(9, shape[0], stride)
    assert layout.tensor_nbytes == shape[0] * stride


@pytest.mark.rule("2.8")
@pytest.mark.parametrize("shape", [[0, 4], [4, -1], [2**62, 2], [2**33, 2**31]])
def test_a_shape_that_no_tensor_has(shape: list[int]) -> None:
    with pytest.raises(ParamInvalidError):
        Layout.of(CacheDesc(1, shape, DataType.DT_INT8))


def slice_of(**changes: Any) -> CacheSlice:
    part = CacheSlice(1, 2, np.array([3, 0], dtype=np.uint64), 8, 12)
    return msgspec.structs.replace(part, **changes)


LAYOUT = Layout(3, 4, 8)


def u64(*values: int) -> Any:
    return np.array(values, dtype=np.uint64)


def test_the_last_unit_is_cut() -> None:
    part = slice_of()
    assert part.nbytes == 24
    wanted = [base + at for base in (2000, 3000) for at in (*range(24, 32), *range(4))]
    assert addresses_of(part.extents(u64(1000, 2000, 3000))) == wanted


@pytest.mark.parametrize("row", [9, 16])
def test_a_slice_within_the_cache_is_fine(row: int) -> None:
    check_slice(slice_of(row_nbytes=row), LAYOUT, unit_nbytes=8)


@pytest.mark.rule("4.113")
@pytest.mark.parametrize(
    "changes",
    [
        {"first_tensor": -1},
        {"first_tensor": 2},
        {"first_tensor": 2**62},
        {"tensor_count": 0},
        {"tensor_count": 3},
        {"unit_nbytes": 4},
        {"unit_nbytes": 4, "row_nbytes": 8},
        {"unit_nbytes": 16},
        {"row_nbytes": 8},
        {"row_nbytes": 17},
        {"row_nbytes": 0},
        {"indices": u64(3, 4)},
        {"indices": u64(4, 0)},
        {"indices": u64(0, 2**63)},
        {"indices": u64(3)},
        {"indices": u64()},
    ],
    ids=repr,
)
def test_a_slice_beyond_the_cache_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ParamInvalidError):
        check_slice(slice_of(**changes), LAYOUT, unit_nbytes=8)


small = st.integers(-1, 12)


@given(small, small, st.lists(st.integers(0, 5), max_size=4), small, st.integers(0, 30))
@settings(max_examples=300)
def test_what_passes_lies_in_the_cache(
    first: int, count: int, indices: list[int], unit: int, row: int
) -> None:
    layout = Layout(3, 4, 8)
    part = CacheSlice(first, count, u64(*indices), unit if unit > 6 else 8, row)
    try:
        check_slice(part, layout, unit_nbytes=8)
    except ParamInvalidError:
        return
    bases = u64(1000, 2000, 3000)
    allowed = {base + at for base in bases.tolist() for at in range(layout.tensor_nbytes)}
    addresses = addresses_of(part.extents(bases))
    assert set(addresses) <= allowed
    assert len(addresses) == part.nbytes
