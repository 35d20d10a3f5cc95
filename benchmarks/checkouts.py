"""This library beside that of another checkout: each has an owner and a reader, two processes of their own.

The benchmarks are this checkout's for both; only ``llm_datadist`` is the other's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.engines import OWNER_ID, READER_ID, Kv
from benchmarks.measure import Candidate, Unavailable
from benchmarks.stage import Bench, environment
from benchmarks.worker import Worker

NOW, BEFORE = "now", "before"
_ROOT = Path(__file__).parents[1]


class Pair:
    """An owner and a reader of the library of one checkout, each with a cache; to be closed.

    Raises:
        Unavailable: There is no library there.
    """

    def __init__(self, root: Path, kv: Kv, backend: str) -> None:
        source = root.resolve() / "src"
        env = environment()
        env["PYTHONPATH"] = os.pathsep.join((str(source), env["PYTHONPATH"]))
        self._kv = kv
        self._stack = ExitStack()
        self._owner, self._reader = (self._start(source, env) for _ in range(2))
        shared: dict[str, Any] = {"kv": vars(kv), "backend": backend, "threads": 1}
        self._address = self._owner.call("own", **shared)["address"]
        self._reader.call("own", **shared, cluster_id=READER_ID, listen="")

    def _start(self, source: Path, env: dict[str, str]) -> Worker:
        worker = Worker(env)
        self._stack.callback(worker.close)
        found = Path(worker.call("library"))
        if source not in found.parents:
            self.close()
            raise Unavailable(f"no library in {source}: {found} is imported instead")
        return worker

    def pulls(self, calls: int) -> Candidate:
        """Pulls of the whole workload; the first has been checked to bring the right bytes."""
        self._reader.call("link", cluster_id=READER_ID, peer_id=OWNER_ID, address=self._address)
        call: dict[str, Any] = {"cluster_id": READER_ID, "peer_id": OWNER_ID, "kv": vars(self._kv)}
        self._reader.call("pulls", **call, calls=1)
        there, here = (
            worker.call("last_block", kv=vars(self._kv), side=side)
            for side, worker in enumerate((self._owner, self._reader))
        )
        if there != here:
            raise RuntimeError(f"{self._kv}: the last block is not what its owner has")
        return self._candidate(lambda: self._reader.call("pulls", **call, calls=calls))

    def links(self, calls: int) -> Candidate:
        """``link_clusters`` and ``unlink_clusters``, both within the clock."""
        call = {"cluster_id": READER_ID, "peer_id": OWNER_ID, "address": self._address, "calls": calls}
        return self._candidate(lambda: self._reader.call("relinks", **call))

    def _candidate(self, turn: Callable[[], list[float]]) -> Candidate:
        return Candidate(turn, (self._owner.pid, self._reader.pid))

    def close(self) -> None:
        self._stack.close()


def checkouts(bench: Bench) -> dict[str, Path]:
    """This checkout and, where another is given, that."""
    return {NOW: _ROOT} if bench.before is None else {NOW: _ROOT, BEFORE: bench.before}


@contextmanager
def pairs(bench: Bench, kv: Kv, backend: str, *names: str) -> Iterator[dict[str, Pair]]:
    """A pair of each checkout, or of those that are named."""
    with ExitStack() as stack:
        made = {}
        for name, root in checkouts(bench).items():
            if not names or name in names:
                made[name] = Pair(root, kv, backend)
                stack.callback(made[name].close)
        yield made
