"""Integers: what is one, which range it has, and what the refusal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist import checks
from llm_datadist.enums import LLMRole

RANGES: list[tuple[Callable[[str, Any], int], int, int]] = [
    (checks.check_uint64, 0, 2**64 - 1),
    (checks.check_int64, -(2**63), 2**63 - 1),
    (checks.check_uint32, 0, 2**32 - 1),
    (checks.check_int32, -(2**31), 2**31 - 1),
    (checks.check_uint16, 0, 2**16 - 1),
    (checks.check_uint8, 0, 2**8 - 1),
]


@pytest.mark.rule("1.24")
@pytest.mark.parametrize(("check", "low", "high"), RANGES)
def test_range_ends_are_inside_and_their_neighbours_are_not(
    check: Callable[[str, Any], int], low: int, high: int
) -> None:
    assert [check("x", low), check("x", high)] == [low, high]
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"^x is {bad}; .*\[{low}, {high}\]$"):
            check("x", bad)


@pytest.mark.rule("1.30")
@pytest.mark.parametrize("bad", [True, False, 1.0, "1", None, np.float64(1), np.bool_(True), [1], b"1"])
def test_what_is_not_an_integer(bad: Any) -> None:
    with pytest.raises(TypeError, match=rf"^x must be an int, not {type(bad).__name__} \("):
        checks.check_uint8("x", bad)


@pytest.mark.rule("1.31")
@pytest.mark.parametrize("value", [np.uint64(7), np.int8(7), np.int64(7)])
def test_numpy_integers_come_back_as_int(value: Any) -> None:
    assert type(checks.check_uint8("x", value)) is int
    assert checks.check_uint8("x", value) == 7
    assert type(checks.check_uint8("x", LLMRole.MIX)) is int


def test_numpy_integer_out_of_range() -> None:
    with pytest.raises(ValueError, match=str(2**64 - 1)):
        checks.check_int64("x", np.uint64(2**64 - 1))


@pytest.mark.parametrize(
    ("value", "kinds", "fits"),
    [
        (1, int, True),
        (np.int64(1), int, True),
        (True, int, False),
        (True, bool, True),
        (1, bool, False),
        (1.5, (int, float), True),
        (1.5, int, False),
        ("a", [int, str], True),
        (None, str, False),
    ],
)
def test_check_isinstance(value: Any, kinds: Any, fits: bool) -> None:
    if fits:
        assert checks.check_isinstance("x", value, kinds) == value
        return
    with pytest.raises(TypeError, match=rf"^x must be .*not {type(value).__name__}"):
        checks.check_isinstance("x", value, kinds)


def test_check_isinstance_none_only_when_allowed() -> None:
    assert checks.check_isinstance("x", None, str, allow_none=True) is None
    with pytest.raises(TypeError, match=r"^x must be str or None, not int \(3\)$"):
        checks.check_isinstance("x", 3, str, allow_none=True)


def test_lists() -> None:
    assert checks.check_list_int32("x", (1, np.int8(-2))) == [1, -2]
    assert checks.check_list_uint64("x", [2**64 - 1]) == (2**64 - 1,)
    with pytest.raises(ValueError, match=r"^x\[1\] is 2147483648"):
        checks.check_list_int32("x", [0, 2**31])
    with pytest.raises(TypeError, match=r"^x\[0\] must be an int, not bool"):
        checks.check_list_int32("x", [True])
    with pytest.raises(TypeError, match=r"^x must be list or tuple, not str"):
        checks.check_list_int32("x", "12")
