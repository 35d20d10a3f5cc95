"""Files stay small enough to read, functions simple enough to follow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
MAX_DOCSTRING_LINES = 15
FILES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_opens_with_a_short_docstring(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, "no module docstring"
    assert len(text.splitlines()) <= MAX_DOCSTRING_LINES


def _complexity(*paths: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "C901"]
    limit = ["--config", "lint.mccabe.max-complexity=10"]
    return subprocess.run([*command, *limit, *paths], capture_output=True, text=True, cwd=ROOT, check=False)


def test_no_function_is_more_complex_than_10() -> None:
    done = _complexity("src", "tests")
    assert done.returncode == 0, done.stdout


def test_a_complex_function_is_found(tmp_path: Path) -> None:
    branches = "".join(f"    if x == {n}:\n        return {n}\n" for n in range(11))
    (tmp_path / "complex.py").write_text(f"def f(x):\n{branches}    return -1\n")
    assert _complexity(str(tmp_path)).returncode == 1
