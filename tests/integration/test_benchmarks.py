"""The command of the benchmarks, with sizes that only show that everything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NO_PEERS = "no .venv-nixl: make bench-peers makes it"


def _run(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The table and the JSON of a run that knows no peers."""
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "benchmarks", "--tiny", "--rounds", "1", "--json", str(file), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "BENCH_PEERS": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def _check_line(line: dict[str, Any], table: str) -> None:
    assert line["row"] and line["workload"] in table, line
    if line["value"] is None:
        assert line["note"] in table, line
        return
    assert line["value"] >= 0 and line["unit"], line
    if line["target"] is not None:
        better = line["value"] - line["target"]
        assert line["met"] is (better >= 0 if line["target_is"] == "at least" else better <= 0), line
    for timing in filter(None, (line["ours_timing"], line["against_timing"])):
        assert 0 < timing["p50_s"] <= timing["p99_s"] and timing["calls"] >= 1, line


@pytest.mark.rule("R.1")
def test_the_table_and_the_json_of_a_few_rows(tmp_path: Path) -> None:
    rows = ["local-32k", "tcp-32k", "block-local", "registering"]
    table, content = _run(tmp_path, "--rows", *rows)
    assert {line["row"] for line in content["lines"]} == set(rows)
    for line in content["lines"]:
        _check_line(line, table)
    assert content["machine"]["cores"] >= 1 and content["machine"]["cpu"] and content["machine"]["kernel"]
    assert (
        content["versions"]["python"] and content["versions"]["llm-datadist"] and content["versions"]["numpy"]
    )
    assert content["command"][:3] == ["python", "-m", "benchmarks"] and "--tiny" in content["command"]
    assert "targets met" in table


def test_what_cannot_take_part_is_a_line_with_the_reason(tmp_path: Path) -> None:
    table, content = _run(tmp_path, "--rows", "local-4k")
    by_other = {line["against"]: line for line in content["lines"]}
    assert by_other["NIXL"]["value"] is None and by_other["NIXL"]["note"] == NO_PEERS
    assert by_other["process_vm_readv"]["value"] > 0
    assert by_other["process_vm_readv"]["against_timing"]["cpu_s"] > 0
    assert f"skipped: {NO_PEERS}" in table


def test_the_library_of_another_checkout_takes_turns(tmp_path: Path) -> None:
    _, content = _run(tmp_path, "--rows", "few-local", "--before", str(ROOT))
    (line,) = content["lines"]
    assert (line["ours"], line["against"], line["target"]) == ("now", "before", 1.05)
    assert line["value"] > 0 and line["ours_timing"]["calls"] == line["against_timing"]["calls"]


def test_a_checkout_without_a_library_is_a_line_with_the_reason(tmp_path: Path) -> None:
    _, content = _run(tmp_path, "--rows", "few-local", "--before", str(tmp_path))
    (line,) = content["lines"]
    assert line["value"] is None and f"no library in {tmp_path / 'src'}" in line["note"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_runs(tmp_path: Path) -> None:
    table, content = _run(tmp_path)
    assert not [line for line in content["lines"] if line["failed"]], table
    for line in content["lines"]:
        _check_line(line, table)
