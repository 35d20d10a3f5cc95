"""Block lists: what is taken comes back equal, the rest is TypeError or ValueError as the contract says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._core.indices import as_indices
from llm_datadist._core.layout import check_distinct, check_indices
from llm_datadist.status import ParamInvalidError

numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(-(2**65), 2**65))
TYPES = [int, np.int8, np.int16, np.uint8, np.int64, np.uint32, np.uint64]


def as_type(kind: Any, value: int) -> Any:
    if kind is int or not np.iinfo(kind).min <= value <= np.iinfo(kind).max:
        return value
    return kind(value)


@given(st.lists(st.tuples(numbers, st.sampled_from(TYPES)), max_size=6), st.sampled_from([list, tuple]))
def test_lists_and_tuples(entries: list[tuple[int, Any]], kind: Any) -> None:
    blocks = kind(as_type(t, n) for n, t in entries)
    plain = [n for n, _ in entries]
    if any(not 0 <= n < 2**64 for n in plain):
        with pytest.raises(ValueError, match=r"b\[\d+\] is -?\d+; a block index"):
            as_indices("b", blocks)
        return
    result = as_indices("b", blocks)
    assert (result.dtype, result.tolist()) == (np.dtype(np.uint64), plain)


@given(st.lists(st.integers(-100, 100)), st.sampled_from(["i1", "<i8", ">i8", "u1", "<u4", ">u8"]))
def test_arrays(plain: list[int], dtype: str) -> None:
    array = np.array([abs(n) for n in plain] if "u" in dtype else plain, dtype=dtype)
    if (array < 0).any():
        with pytest.raises(ValueError, match=r"b\[\d+\] is -\d+"):
            as_indices("b", array)
        return
    result = as_indices("b", array)
    assert (result.dtype, result.tolist()) == (np.dtype(np.uint64), array.tolist())
    array[:] = 1
    assert result.tolist() != array.tolist() or all(n == 1 for n in result.tolist())


@pytest.mark.parametrize(
    "blocks",
    [
        [True], [0, np.bool_(True)], [1.0], [np.float32(1)], ["1"], [None], [[1]], "12", b"12", {1}, 3, None, range(3),
        np.array([True]), np.array([1.0]), np.array([[1]]), np.array(1), np.array(["1"]), np.array([1], dtype=object),
    ],
    ids=repr,
)  # fmt: skip
def test_other_types(blocks: Any) -> None:
    with pytest.raises(TypeError, match="b"):
        as_indices("b", blocks)


def test_the_place_of_what_is_wrong_is_named() -> None:
    with pytest.raises(TypeError, match=r"b\[2\] must be an int, not float"):
        as_indices("b", [0, 1, 2.0, 3])
    with pytest.raises(ValueError, match=r"b\[1\] is -1"):
        as_indices("b", [0, -1])
    with pytest.raises(ValueError, match=rf"b\[2\] is {2**64}"):
        as_indices("b", [0, 1, 2**64])


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 12))
def test_every_index_is_checked_and_the_first_bad_one_named(blocks: list[int], limit: int) -> None:
    array = np.array(blocks, dtype=np.uint64)
    bad = next(((i, b) for i, b in enumerate(blocks) if b >= limit), None)
    if bad is None:
        check_indices("src_blocks", array, limit)
        return
    with pytest.raises(
        ParamInvalidError, match=rf"src_blocks\[{bad[0]}\] is {bad[1]}, but that cache has {limit} "
    ):
        check_indices("src_blocks", array, limit)


@given(st.lists(st.integers(0, 30), max_size=8), st.sampled_from([31, 10**6, 2**64]))
def test_a_repeated_destination_is_named(blocks: list[int], limit: int) -> None:
    twice = {b for b in blocks if blocks.count(b) > 1}
    array = np.array(blocks, dtype=np.uint64)
    if not twice:
        check_distinct("dst_blocks", array, limit)
        return
    with pytest.raises(ParamInvalidError, match="dst_blocks names block") as caught:
        check_distinct("dst_blocks", array, limit)
    assert int(str(caught.value).split("block ")[1].split()[0]) in twice
