"""Which tests may be for ``make test-long`` only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.slow_rule import breaches


def _item(module: str, name: str, slow: bool) -> Any:
    return SimpleNamespace(
        path=Path(f"tests/integration/{module}.py"),
        name=f"{name}[x]",
        originalname=name,
        get_closest_marker=lambda marker: marker if slow and marker == "slow" else None,
    )


def test_a_test_that_only_test_long_would_run_is_found() -> None:
    found = breaches(
        [_item("test_x", "more", True), _item("test_x", "more", False), _item("test_x", "only", True)]
    )
    assert found == ["test_x::only"]


def test_what_has_a_reason_is_none() -> None:
    assert not breaches([_item("test_nixl_engine", "any", True)])
    assert not breaches([_item("test_timeouts", "test_t4_a_short_timeout_on_one_host", True)])
