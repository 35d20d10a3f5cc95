"""Threads are started in one place, where a system that has none for now is told in words, with its limits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "llm_datadist"
# The latter two keep account of threads that are about to be started, also beside an interrupt.
MAY = {"_shortages.py", "_engine/workers.py", "_engine/errands.py"}


def starts(source: str) -> bool:
    """Whether a module makes threads."""
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("threading.Thread", "Thread", "threading.Timer")
        for node in ast.walk(ast.parse(source))
    )


def test_g3_threads_are_started_in_one_place() -> None:
    makers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if starts(path.read_text())}
    assert {maker for maker in makers if not maker.startswith("testing/")} <= MAY


@pytest.mark.parametrize(
    ("source", "found"), [("threading.Thread(target=f).start()", True), ("Threads()", False)]
)
def test_what_makes_a_thread_is_found(source: str, found: bool) -> None:
    assert starts(source) is found
