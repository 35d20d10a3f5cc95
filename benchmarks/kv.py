"""The ``kv`` workload: T tensors of B blocks, some of them pulled in random order between two processes.

Run ``python -m benchmarks.kv --help``; the method is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable

from benchmarks.api import pull_blocks
from benchmarks.measure import Sample, alternate
from benchmarks.references import bare_readv, plain_copy, raw_tcp
from benchmarks.subject import Subject

# candidate -> the reference that it is held against
RATIOS = {
    "local": "process_vm_readv",
    "pull_blocks local": "process_vm_readv",
    "tcp": "raw tcp",
    "pull_blocks tcp": "raw tcp",
}


def measure(options: argparse.Namespace, block_nbytes: int) -> dict[str, Sample]:
    """Times of the transports, of the public interface over them and of the references."""
    threads = options.threads
    subject = Subject(options.tensors, options.blocks, options.pulled, block_nbytes, threads)
    endings: list[Callable[[], None]] = [subject.close]
    try:
        (region,) = subject.owner.allocate([subject.nbytes], 99)
        port = subject.owner.call("raw_listen", address=region, nbytes=subject.nbytes)
        candidates = {
            "plain copy": plain_copy(subject.nbytes),
            "process_vm_readv": bare_readv(subject.owner.pid, subject.pairs(), threads),
            "local": subject.local(),
            "raw tcp": raw_tcp(port, subject.nbytes),
            "tcp": subject.tcp(),
        }
        for backend in () if options.no_api else ("local", "tcp"):
            candidates[f"pull_blocks {backend}"], end = pull_blocks(
                subject, backend, options.mode == "accessible"
            )
            endings.insert(0, end)
        return alternate(candidates, options.rounds)
    finally:
        for end in endings:
            end()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=256, help="blocks of each tensor")
    parser.add_argument("--pulled", type=int, default=128, help="of them, in random order")
    parser.add_argument("--block-nbytes", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of local, and of its reference"
    )
    parser.add_argument("--mode", choices=("managed", "accessible"), default="managed", help="of pull_blocks")
    parser.add_argument("--no-api", action="store_true", help="only the transports and the references")
    parser.add_argument("--rounds", type=int, default=9, help="at least 7")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args()
    cases = []
    for nbytes in options.block_nbytes:
        samples = measure(options, nbytes)
        moved = options.tensors * options.pulled * nbytes
        cases.append(
            {
                "tensors": options.tensors,
                "blocks": options.pulled,
                "block_nbytes": nbytes,
                "threads": options.threads,
                "gb_per_s": {name: moved / s.median / 1e9 for name, s in samples.items()},
                "ratios": {
                    name: samples[ref].median / samples[name].median
                    for name, ref in RATIOS.items()
                    if name in samples
                },
            }
        )
    if options.json:
        json.dump(
            {
                "machine": platform.platform(),
                "cpus": os.cpu_count(),
                "rounds": options.rounds,
                "cases": cases,
            },
            sys.stdout,
            indent=1,
        )
        print()
    else:
        print_table(cases)


def print_table(cases: list[dict[str, object]]) -> None:
    """One line per block size."""
    for case in cases:
        speeds, ratios = case["gb_per_s"], case["ratios"]
        assert isinstance(speeds, dict) and isinstance(ratios, dict)
        print(f"{case['tensors']} tensors x {case['blocks']} blocks x {case['block_nbytes']} bytes")
        for name, speed in speeds.items():
            ratio = f"   {ratios[name]:.2f} of {RATIOS[name]}" if name in ratios else ""
            print(f"  {name:18} {speed:7.2f} GB/s{ratio}")


if __name__ == "__main__":
    main()
