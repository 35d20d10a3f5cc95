"""The rows of the table, in its order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

from benchmarks import rows_before, rows_block, rows_control, rows_cpu, rows_pull
from benchmarks.measure import Unavailable
from benchmarks.report import Line
from benchmarks.stage import Bench

Row = Callable[[Bench], Iterator[Line]]

ROWS: dict[str, Row] = {
    "local-32k": rows_pull.local_32k,
    "local-4k": rows_pull.local_4k,
    "local-128k": rows_pull.local_128k,
    "shm-32k": rows_pull.shm_32k,
    "shm-4k": rows_pull.shm_4k,
    "sizes": rows_pull.sizes,
    "tcp-32k": rows_pull.tcp_32k,
    "many-tensors": rows_pull.many_tensors,
    "linear": rows_pull.linear,
    "block-local": rows_block.block_local,
    "block-tcp": rows_block.block_tcp,
    "few-local": rows_before.few_local,
    "linking": rows_before.linking,
    "small-tcp": rows_block.small_tcp,
    "planning": rows_control.planning,
    "registering": rows_control.registering,
    "sleeper": rows_control.sleeper,
    "busy-local": rows_block.busy_local,
    "busy-tcp": rows_block.busy_tcp,
    "layerwise": rows_block.layerwise,
    "idle": rows_cpu.idle,
    "throttled": rows_cpu.throttled,
    "dead": rows_cpu.dead,
    "nixl-32k": rows_pull.nixl_32k,
    "block-nixl": rows_block.block_nixl,
}


def run(name: str, bench: Bench) -> Iterator[Line]:
    """The lines of one row; one line with the reason if it cannot be measured here, or fails."""
    try:
        yield from ROWS[name](bench)
    except Unavailable as exc:
        yield Line(name, "", note=str(exc))
    except Exception as exc:  # the other rows go on
        traceback.print_exc()
        yield Line(name, "", note=f"{type(exc).__name__}: {exc}", failed=True)
