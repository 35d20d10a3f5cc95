"""The README's example runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 35


def _example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(code)


@pytest.mark.rule("R.7")
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", "-c", _example()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "[True, True]" in done.stdout
    assert "LLM_SUCCESS" in done.stdout


def test_the_example_is_short() -> None:
    assert len([line for line in _example().splitlines() if line.strip()]) <= MAX_LINES


def test_links_of_the_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    missing = []
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                missing.append(f"{document.relative_to(ROOT)}: {target}")
    assert not missing
