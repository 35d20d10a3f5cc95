"""One table of what the library does beside its references and peers: ``python -m benchmarks``.

The method is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks import peers, report, rows
from benchmarks.stage import MIN_ROUNDS, Bench


def main() -> int:
    """The command; 1 if a row ended with an error, which a missed target is not."""
    options = _parser().parse_args()
    if options.list:
        for name, row in rows.ROWS.items():
            print(f"{name:14} {(row.__doc__ or '').splitlines()[0]}")
        return 0
    bench = Bench.of(options)
    begin = time.monotonic()
    machine = report.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    print(report.header(), flush=True)
    lines: list[report.Line] = []
    seconds: dict[str, float] = {}
    for name in options.rows:
        row_begin = time.monotonic()
        for line in rows.run(name, bench):
            lines.append(line.of_row(name))
            print(report.table_line(line), flush=True)
        seconds[name] = round(time.monotonic() - row_begin, 1)
    print(f"\n{report.summary(lines)} ({time.monotonic() - begin:.0f} s)")
    content = report.document(lines, vars(options), machine, peers.versions())
    content["seconds"] = seconds
    report.write(options.json, content)
    print(f"written to {options.json}")
    return int(any(line.failed for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", choices=list(rows.ROWS), default=list(rows.ROWS), metavar="ROW",
        help="only these; --list tells which there are",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="the rows, and what they show")
    parser.add_argument(
        "--rounds", type=int, default=9, help=f"of each comparison; figures need {MIN_ROUNDS}"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)),
        help="movers of local and shm, and of their references",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT",
        help="another checkout of this repository, to compare with: few-local, linking",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=_default_json(), metavar="FILE", help="default %(default)s"
    )
    return parser


def _default_json() -> Path:
    return Path(".cache") / "benchmarks" / time.strftime("%Y%m%d-%H%M%S.json")


if __name__ == "__main__":
    sys.exit(main())
