"""Two network namespaces joined by a veth pair of limited rate. Needs root, ip and tc; cleans up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import Unavailable


@dataclass(frozen=True)
class Namespace:
    """A network of its own; a process runs there behind ``prefix``."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@contextlib.contextmanager
def joined(shape: tuple[str, ...]) -> Iterator[tuple[Namespace, Namespace]]:
    """The pair; ``shape`` is what tc's tbf is told, for each direction.

    Raises:
        Unavailable: Namespaces cannot be made here.
    """
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking or os.geteuid() != 0:
        raise Unavailable("network namespaces need root and the commands ip and tc (Debian: iproute2)")
    ends = tuple(Namespace(f"bench{os.getpid()}{side}", f"10.78.0.{n}") for n, side in ((1, "a"), (2, "b")))
    with contextlib.ExitStack() as stack:
        for end in ends:
            _run("ip", "netns", "add", end.name)
            stack.callback(_run, "ip", "netns", "del", end.name)
        a, b = ends
        _run(
            "ip", "link", "add", "eth0", "netns", a.name, "type", "veth", "peer", "name", "eth0", "netns", b.name,
        )  # fmt: skip
        for end in ends:
            _run("ip", "-n", end.name, "addr", "add", f"{end.address}/24", "dev", "eth0")
            _run("ip", "-n", end.name, "link", "set", "lo", "up")
            _run("ip", "-n", end.name, "link", "set", "eth0", "up")
            _run("tc", "-n", end.name, "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)
        yield a, b


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])} ...: {done.stderr.strip()}")
