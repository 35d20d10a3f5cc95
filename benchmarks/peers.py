"""Other libraries with this job, each in an environment of its own, driven as a pair of processes.

``python -m benchmarks.peers`` makes the environments and says in a line what it cannot make, and why.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import Kv
from benchmarks.measure import Candidate, Unavailable
from llm_datadist.testing.owner import OwnerProcess

ROOT = Path(__file__).parents[1]
_DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True)
class Environment:
    """Where a library is installed, and how.

    Attributes:
        packages: Arguments of ``pip install``.
        distribution: The one whose version is reported.
        libraries: Shared libraries that the system must have, by soname: the Debian package.
    """

    name: str
    packages: tuple[str, ...]
    distribution: str
    driver: str
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        return Path(os.environ.get("BENCH_PEERS", ROOT)) / f".venv-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


NIXL_ENV = Environment("nixl", ("--no-deps", "nixl-cu12", "numpy"), "nixl-cu12", "nixl_end.py")
MOONCAKE_ENV = Environment(
    "mooncake",
    ("mooncake-transfer-engine-non-cuda", "numpy"),
    "mooncake-transfer-engine-non-cuda",
    "mooncake_end.py",
    (
        ("libibverbs.so.1", "libibverbs1"),
        ("librdmacm.so.1", "librdmacm1"),
        ("libnuma.so.1", "libnuma1"),
        ("libcurl.so.4", "libcurl4"),
    ),
)
ENVIRONMENTS = (NIXL_ENV, MOONCAKE_ENV)


@dataclass(frozen=True)
class Peer:
    """A library, used in one way."""

    name: str
    environment: Environment
    variables: tuple[tuple[str, str], ...] = ()


NIXL = Peer("NIXL", NIXL_ENV, (("UCX_LOG_LEVEL", "fatal"), ("NIXL_LOG_LEVEL", "ERROR")))
NIXL_TCP = Peer("NIXL over tcp", NIXL_ENV, (*NIXL.variables, ("UCX_TLS", "tcp")))
MOONCAKE = Peer("Mooncake tcp", MOONCAKE_ENV, (("MC_LOG_LEVEL", "ERROR"), ("GLOG_minloglevel", "2")))


class PeerProcesses:
    """Two processes of a library: one owns the blocks, the other reads them.

    Raises:
        Unavailable: The library is not there, or does not work here.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        if problem := missing(peer.environment):
            raise Unavailable(problem)
        self._ends = [self._start() for _ in range(2)]

    def prepare(self, kv: Kv) -> None:
        """Memory on both sides, and everything else that can be done before the clock starts."""
        size = {"tensors": kv.tensors, "blocks": kv.blocks, "block_nbytes": kv.block_nbytes}
        source, destination = kv.lists()
        owner, reader = self._ends
        try:
            told = owner.call("own", **size, seed=1)
            reader.call("own", **size, seed=1 + kv.tensors)
            reader.call("meet", **told, source=source, destination=destination)
            reader.call("turn")
            last = kv.tensors - 1
            there = owner.call("peek", tensor=last, block=source[-1])
            if reader.call("peek", tensor=last, block=destination[-1]) != there:
                raise Unavailable(f"{self._peer.name} did not bring the right bytes")
        except RuntimeError as exc:
            raise Unavailable(f"{self._peer.name}: {exc}") from exc
        self._signal(signal.SIGSTOP)

    def turns(self) -> Candidate:
        """The whole workload, once per turn."""
        return Candidate(lambda: self._turn("turn"), self._pids)

    def singles(self, calls: int) -> Candidate:
        """A request of its own for every call."""
        return Candidate(lambda: self._turn("singles", calls=calls), self._pids)

    def _turn(self, command: str, **arguments: Any) -> Any:
        """Stopped between its turns: a progress thread that never sleeps would take a core from all others."""
        self._signal(signal.SIGCONT)
        try:
            return self._ends[1].call(command, **arguments)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for end in self._ends:
            end.close()  # not killed: a library may have shared memory to give back

    @property
    def _pids(self) -> tuple[int, ...]:
        return tuple(end.pid for end in self._ends)

    def _start(self) -> OwnerProcess:
        it = self._peer.environment
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return OwnerProcess(
            [str(it.python), str(_DRIVERS / it.driver)],
            env={**variables, **dict(self._peer.variables)},
            stderr=subprocess.DEVNULL,
        )


def missing(environment: Environment) -> str:
    """Why the library cannot be used; "" if it can."""
    if not environment.python.exists():
        return f"no {environment.folder.name}: make bench-peers makes it"
    return _missing_libraries(environment)


def versions() -> dict[str, str]:
    """Of the libraries that are there."""
    found = {}
    for it in ENVIRONMENTS:
        if not missing(it):
            code = f"import importlib.metadata as m; print(m.version({it.distribution!r}))"
            done = subprocess.run([str(it.python), "-c", code], capture_output=True, text=True, check=False)
            found[it.name] = done.stdout.strip() or "?"
    return found


def install(environment: Environment) -> str:
    """Makes the environment; the reason if it could not."""
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    steps = (
        [sys.executable, "-m", "venv", "--without-pip", str(environment.folder)],
        [*pip, "--python", str(environment.python), "install", *quiet, *environment.packages],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(environment.folder, ignore_errors=True)  # half an environment looks like one
            said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
            return f"{' '.join(step[1:3])}: {said[-1]}"
    return _missing_libraries(environment)


def _missing_libraries(environment: Environment) -> str:
    packages = []
    for soname, package in environment.libraries:
        try:
            ctypes.CDLL(soname)
        except OSError:
            packages.append(package)
    return f"the system lacks libraries of it: apt-get install {' '.join(packages)}" if packages else ""


def main() -> None:
    """Makes what is missing; a library that cannot be installed does not stop the others."""
    for it in ENVIRONMENTS:
        ready = it.python.exists() and not missing(it) and versions().get(it.name, "?") != "?"
        problem = "" if ready else install(it)
        print(f"{it.folder.name}: {problem or 'ready'}")


if __name__ == "__main__":
    main()
