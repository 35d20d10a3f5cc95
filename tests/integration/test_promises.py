"""Promises of README.md and SECURITY.md that no other test keeps."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from llm_datadist._core.options import parse_options

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"python", "python3", "touch", "rm", "echo", "exit"}  # pip is called by python -m


@pytest.mark.rule("R.4", "R.6")
def test_g10_what_it_runs_on_is_what_the_package_says() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"Operating System :: ([^\"]+)", project) == ["POSIX :: Linux"]
    assert 'requires-python = ">=3.10"' in project


@pytest.mark.rule("R.6")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_g10_the_two_commands_need_python_pip_and_make(target: str, tmp_path: Path) -> None:
    """On a fresh machine: what make would run there, but for shells that only choose."""
    command = ["make", "-n", "--no-print-directory", target, f"VENV={tmp_path}/venv", "PYTHON=python3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    told = re.sub(r"'[^']*'|\\\n", "", done.stdout)
    calls = [call.split() for call in re.split(r"&&|\|\||[;{}\n]", told)]
    assert {Path(words[0]).name for words in calls if words} <= TOOLS, done.stdout


@pytest.mark.rule("S.12")
def test_g10_tracers_are_not_allowed_by_default() -> None:
    assert not parse_options({"llm.EnableCacheManager": "1"}).allow_ptrace
