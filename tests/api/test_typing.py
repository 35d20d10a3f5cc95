"""What callers' type checkers see: right programs pass ``mypy --strict``, wrong ones fail where they are wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tests" / "typing"
MARK = re.compile(r"# error: ([a-z-]+)$")
REPORT = re.compile(r"^[^:]+:(\d+): error: .*\[([a-z-]+)\]$")


def mypy(path: Path, cache: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        os.devnull,
        "--cache-dir",
        str(cache),
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        cwd=cache,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.timeout(300)
def test_right_programs_pass(cache: Path) -> None:
    assert mypy(EXAMPLES / "good.py", cache) == []


@pytest.mark.timeout(300)
def test_wrong_lines_are_refused_and_no_others(cache: Path) -> None:
    lines = (EXAMPLES / "bad.py").read_text().splitlines()
    wanted = {(at, match[1]) for at, line in enumerate(lines, 1) if (match := MARK.search(line))}
    reports = [REPORT.match(line) for line in mypy(EXAMPLES / "bad.py", cache)]
    found = {(int(report[1]), report[2]) for report in reports if report}
    assert found == wanted
    assert len(found) > 30


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "llm_datadist" / "py.typed").exists()
