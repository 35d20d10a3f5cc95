"""What the benchmarks print: one line per comparison, and the same as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Sample


@dataclass(frozen=True)
class Target:
    """A bound on the value of a line; a limit of None is only reported."""

    limit: float | None = None
    at_least: bool = True

    def met(self, value: float) -> bool | None:
        if self.limit is None:
            return None
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, unit: str) -> str:
        return "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g} {unit}"


REPORTED = Target()


def at_least(limit: float) -> Target:
    return Target(limit)


def at_most(limit: float) -> Target:
    return Target(limit, at_least=False)


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
        workload: What was done.
        ours: Our candidate.
        against: The reference or the peer; "" for a value on its own.
        value: The figure that the target bounds; None when the line was skipped.
        unit: Of the value; "x" for a ratio of speeds, "x time" for a ratio of times.
        sample: What ours took, if it was timed.
        reference: What the other took.
        nbytes: Moved by one call, for the speed.
        note: Why it was skipped, or what to know about it.
        row: Name of the row, for ``--rows``; the command sets it.
        failed: It was tried and ended with an error.
    """

    workload: str
    ours: str
    against: str = ""
    value: float | None = None
    unit: str = "x"
    target: Target = REPORTED
    sample: Sample | None = None
    reference: Sample | None = None
    nbytes: int = 0
    note: str = ""
    row: str = ""
    failed: bool = False

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.target.met(self.value)

    def of_row(self, row: str) -> Line:
        return replace(self, row=row)


def speed(
    workload: str, ours: str, against: str, samples: dict[str, Sample], nbytes: int, target: Target = REPORTED
) -> Line:
    """How fast ours is, as a multiple of the other."""
    mine, other = samples[ours], samples[against]
    return Line(workload, ours, against, other.p50 / mine.p50, "x", target, mine, other, nbytes)


def duration(
    workload: str, ours: str, against: str, samples: dict[str, Sample], target: Target = REPORTED
) -> Line:
    """How long ours takes, as a multiple of the other."""
    mine, other = samples[ours], samples[against]
    return Line(workload, ours, against, mine.p50 / other.p50, "x time", target, mine, other)


_WIDTHS = (34, 17, 23, 13, 14, 5, 19, 19, 12, 20)
_HEADER = (
    "workload", "ours", "against", "value", "target", "met", "ours p50/p99", "against p50/p99", "GB/s", "CPU ms a call",
)  # fmt: skip


def header() -> str:
    return _cells(_HEADER) + "\n" + _cells(tuple("-" * width for width in _WIDTHS))


def table_line(line: Line) -> str:
    if line.value is None:
        return (
            _cells((line.workload, line.ours, line.against))
            + f"  {'FAILED' if line.failed else 'skipped'}: {line.note}"
        )
    verdict = {None: "", True: "yes", False: "NO"}[line.met]
    cells = (
        line.workload,
        line.ours,
        line.against,
        f"{line.value:.3g} {line.unit}",
        line.target.text("x" if line.unit.startswith("x") else line.unit),
        verdict,
        _times(line.sample),
        _times(line.reference),
        _pair(line, lambda s: f"{line.nbytes / s.p50 / 1e9:.2f}") if line.nbytes else "",
        _pair(line, lambda s: "" if s.cpu_s is None else f"{s.cpu_s * 1e3:.3g}"),
    )
    return (_cells(cells) + (f"  {line.note}" if line.note else "")).rstrip()


def summary(lines: Sequence[Line]) -> str:
    judged = [line for line in lines if line.met is not None]
    missed = [f"{line.workload}, {line.ours} / {line.against or 'alone'}" for line in judged if not line.met]
    text = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    return text + ("; missed: " + "; ".join(missed) if missed else "")


def document(
    lines: Sequence[Line], options: dict[str, Any], machine: dict[str, Any], peers: dict[str, str]
) -> dict[str, Any]:
    """Everything about a run that somebody needs who compares it with another."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in options.items()},
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            "numpy": importlib.metadata.version("numpy"),
            "llm-datadist": importlib.metadata.version("llm-datadist"),
            **peers,
        },
        "lines": [_as_json(line) for line in lines],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _field(path: str, name: str) -> str:
    with open(path) as file:
        return next((text.partition(":")[2].strip() for text in file if text.startswith(name)), "")


def _cells(cells: Sequence[str]) -> str:
    return " ".join(text.ljust(width) for text, width in zip(cells, _WIDTHS, strict=False))


def _times(sample: Sample | None) -> str:
    if sample is None:
        return ""
    scale, unit = (1e3, "ms") if sample.p50 >= 1e-3 else (1e6, "us")
    return f"{sample.p50 * scale:.4g} / {sample.p99 * scale:.4g} {unit}"


def _pair(line: Line, text: Any) -> str:
    return " : ".join(text(sample) for sample in (line.sample, line.reference) if sample is not None)


def _as_json(line: Line) -> dict[str, Any]:
    def timing(sample: Sample | None) -> dict[str, Any] | None:
        if sample is None:
            return None
        few = sample.seconds if len(sample.seconds) <= 50 else ()  # of many calls, p50 and p99 say enough
        return {
            "p50_s": sample.p50,
            "p99_s": sample.p99,
            "calls": len(sample.seconds),
            "seconds": list(few),
            "cpu_s": sample.cpu_s,
            "gb_per_s": line.nbytes / sample.p50 / 1e9 if line.nbytes else None,
        }

    return {
        "row": line.row,
        "workload": line.workload,
        "ours": line.ours,
        "against": line.against,
        "value": line.value,
        "unit": line.unit,
        "target": line.target.limit,
        "target_is": "at least" if line.target.at_least else "at most",
        "met": line.met,
        "ours_timing": timing(line.sample),
        "against_timing": timing(line.reference),
        "note": line.note,
        "failed": line.failed,
    }
