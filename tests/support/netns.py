"""Network namespaces joined by a veth pair, slow if wished. Needs root and iproute2; cleans up."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_number = itertools.count()
RATE = ("rate", "80mbit", "burst", "256kb", "latency", "400ms")  # 10 MB/s
FULL_RATE = ("rate", "80gbit", "burst", "256mb", "latency", "400ms")


@dataclass(frozen=True)
class Namespace:
    """A network of its own; ``address`` is its end of the veth pair ("" without one)."""

    name: str
    address: str = ""

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    @property
    def device(self) -> str:
        return f"v{self.name}"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def need_namespaces() -> None:
    """Skips the test, with the reason, where namespaces cannot be made."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"network namespaces need the command {tool} (Debian: iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")


@contextlib.contextmanager
def namespace(loopback: bool = True, address: str = "") -> Iterator[Namespace]:
    """A fresh namespace, with loopback only; /etc/resolv.conf is empty inside."""
    need_namespaces()
    it = Namespace(f"dd{os.getpid()}x{next(_number)}", address)
    etc = f"/etc/netns/{it.name}"
    try:
        _ip("netns", "add", it.name)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no network namespace can be made here: {exc.stderr.strip()}")
    try:
        os.makedirs(etc)
        with open(f"{etc}/resolv.conf", "w"):
            pass
        if loopback:
            _ip("-n", it.name, "link", "set", "lo", "up")
        yield it
    finally:
        shutil.rmtree(etc, ignore_errors=True)
        _ip("netns", "del", it.name)


@contextlib.contextmanager
def joined(slow: bool = True, loopback: bool = True) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with a veth pair between them; slow: 10 MB/s each way."""
    subnet = f"10.77.{next(_number) % 250}"
    with namespace(True, f"{subnet}.1") as a, namespace(loopback, f"{subnet}.2") as b:
        _ip(
            "link",
            "add",
            a.device,
            "netns",
            a.name,
            "type",
            "veth",
            "peer",
            "name",
            b.device,
            "netns",
            b.name,
        )
        for it in (a, b):
            _ip("-n", it.name, "addr", "add", f"{it.address}/24", "dev", it.device)
            _ip("-n", it.name, "link", "set", it.device, "up")
            if slow:
                shape(it, "add", RATE)
        yield a, b


def shape(net: Namespace, what: str, rate: tuple[str, ...]) -> None:
    """How fast bytes leave this end."""
    command = ["tc", "-n", net.name, "qdisc", what, "dev", net.device, "root", "tbf", *rate]
    subprocess.run(command, check=True, capture_output=True)
