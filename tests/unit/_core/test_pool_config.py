"""§6 Pools: the text of a pool option."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist._core.option_rules import BrokenRuleError
from llm_datadist._core.pool_config import PoolConfig, read_pool


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"memory_size": 1 << 16}, PoolConfig(1 << 16, 16)),
        ({"memory_size": 1024, "page_shift": 10}, PoolConfig(1024, 10)),
        ({"memory_size": 1 << 30, "page_shift": 30}, PoolConfig(1 << 30, 30)),
        ({"memory_size": 70_000, "b": 1, "a": None}, PoolConfig(70_000, 16, ("a", "b"))),
    ],
)
@pytest.mark.rule("6.61", "6.62")
def test_good(fields: dict[str, Any], config: PoolConfig) -> None:
    assert read_pool(fields) == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "memory_size"),
        ({"page_shift": 16}, "memory_size"),
        *[({"memory_size": bad}, "memory_size") for bad in (0, -1, "65536", True, 65536.0, None, 2**63)],
        ({"memory_size": (1 << 16) - 1}, "65535"),
        ({"memory_size": 1 << 20, "page_shift": 21}, "1048576"),
        *[
            ({"memory_size": 1 << 40, "page_shift": bad}, "page_shift")
            for bad in (9, 31, -1, "16", True, 16.0, None)
        ],
    ],
)
@pytest.mark.rule("6.61", "6.62", "6.63", "6.64")
def test_bad(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BrokenRuleError, match=named):
        read_pool(fields)
