"""Threads are started and waited for in one way, which interrupts, and a system without threads, leave whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_SRC = Path(__file__).resolve().parents[2] / "src" / "llm_datadist"
# Where threads of the engine alone wait, whom no signal strikes.
_CONDITIONS = {"_engine/workers.py"}
_STARTS = re.compile(r"threading\.Thread\(|[^`]\bEvent\(\)|\bSemaphore\(")
_CONDITION = re.compile(r"\bCondition\(")
_FILES = [p for p in sorted(_SRC.rglob("*.py")) if "testing" not in p.parts]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_SRC)))
def test_g13_a_module_starts_and_awaits_threads_as_all_do(path: Path) -> None:
    text, name = path.read_text(), str(path.relative_to(_SRC))
    assert name == "_shortages.py" or not _STARTS.search(text), (
        "see start_thread in _shortages.py, Latch in _waiting.py"
    )
    assert name in _CONDITIONS or not _CONDITION.search(text), "see Changes in _waiting.py"
