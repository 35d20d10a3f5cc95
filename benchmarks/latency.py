"""One block at a time: the transports beside a plain request and reply over TCP, a thread answering.

Run ``python -m benchmarks.latency --help``; the method is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.references import raw_tcp
from benchmarks.subject import Subject


def measure(block_nbytes: int, calls: int) -> dict[str, dict[str, float]]:
    """Microseconds per call, by candidate: median, 99th percentile, worst, and the first call."""
    subject = Subject(tensors=1, blocks=16, pulled=1, block_nbytes=block_nbytes, threads=1)
    try:
        (region,) = subject.owner.allocate([block_nbytes], 99)
        port = subject.owner.call("raw_listen", address=region, nbytes=block_nbytes)
        candidates = {
            "raw tcp": raw_tcp(port, block_nbytes),
            "tcp": subject.tcp(),
            "local": subject.local(),
        }
        first = {name: _time(call) for name, call in candidates.items()}
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(calls):
            for name, call in candidates.items():
                times[name].append(_time(call))
        return {name: _summary(first[name], t) for name, t in times.items()}
    finally:
        subject.close()


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _summary(first: float, times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, (50, 99))
    return {"first": first, "p50": float(p50), "p99": float(p99), "worst": max(times)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-nbytes", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args()
    cases = [{"block_nbytes": n, "microseconds": measure(n, options.calls)} for n in options.block_nbytes]
    if options.json:
        json.dump({"calls": options.calls, "cases": cases}, sys.stdout, indent=1)
        print()
        return
    for nbytes, case in zip(options.block_nbytes, cases, strict=True):
        print(f"one block of {nbytes} bytes, microseconds")
        for name, sample in case["microseconds"].items():  # type: ignore[attr-defined]
            print(f"  {name:10}" + "".join(f"  {what} {value:8.1f}" for what, value in sample.items()))


if __name__ == "__main__":
    main()
