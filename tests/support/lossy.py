"""Two network namespaces with a slow and lossy network between them. Needs root.

By netem where the kernel has it; else by a relay in a process of its own, between two TUN devices, which
holds back every packet and drops some. Run as a module it is that relay. The packets that are dropped are
drawn by a seeded generator.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

import pytest

from tests.support.netns import Namespace, joined, namespace

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_PACKET_NBYTES = 1 << 16
_QUEUE_PACKETS = 4096  # what does not fit is lost, as in any router


@contextlib.contextmanager
def lossy(delay_ms: int, loss_percent: float) -> Iterator[tuple[Namespace, Namespace, str]]:
    """The namespaces, and by what their network is slow. Skips, with the reasons, where neither way works."""
    with joined(slow=False) as (a, b):
        why = _netem(a, delay_ms, loss_percent) or _netem(b, delay_ms, loss_percent)
        if not why:
            yield a, b, "netem"
            return
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip(f"a lossy network needs netem ({why}) or /dev/net/tun, which is not there")
    with _relayed(delay_ms, loss_percent) as (a, b):
        yield a, b, f"relay (no netem: {why})"


def _netem(it: Namespace, delay_ms: int, loss_percent: float) -> str:
    """ "" or why not."""
    rule = ["netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%", "limit", str(_QUEUE_PACKETS)]
    command = ["tc", "-n", it.name, "qdisc", "add", "dev", it.device, "root", *rule]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()


@contextlib.contextmanager
def _relayed(delay_ms: int, loss_percent: float) -> Iterator[tuple[Namespace, Namespace]]:
    with namespace(True, "10.78.0.1") as a, namespace(True, "10.78.0.2") as b:
        command = [sys.executable, "-m", "tests.support.lossy", str(delay_ms), str(loss_percent)]
        ends = [word for it in (a, b) for word in (it.name, it.device, it.address)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with subprocess.Popen([*command, *ends], stdout=subprocess.PIPE, env=environment) as relay:
            try:
                assert relay.stdout is not None
                assert relay.stdout.readline() == b"ready\n"
                yield a, b
            finally:
                relay.kill()


def _device(net: str, name: str, address: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
    inside = ("-n", net)
    for command in (
        ("link", "set", name, "netns", net),
        (*inside, "addr", "add", f"{address}/24", "dev", name),
        (*inside, "link", "set", name, "up"),
    ):
        subprocess.run(["ip", *command], check=True)
    return fd


def _relay(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    rng = random.Random(0)
    towards = {ends[0]: ends[1], ends[1]: ends[0]}
    held: deque[tuple[float, int, bytes]] = deque()  # one delay for all: in order of their times
    poller = select.poll()
    for fd in ends:
        poller.register(fd, select.POLLIN)
    while True:
        left = max(0.0, held[0][0] - time.monotonic()) * 1000 if held else None
        for fd, _ in poller.poll(left):
            packet = os.read(fd, _PACKET_NBYTES)
            if rng.random() >= loss and len(held) < _QUEUE_PACKETS:
                held.append((time.monotonic() + delay_s, towards[fd], packet))
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, fd, packet = held.popleft()
            with contextlib.suppress(OSError):  # its queue is full, or it is going away
                os.write(fd, packet)


def main(delay_ms: str, loss_percent: str, *ends: str) -> None:
    """The relay."""
    fds = _device(*ends[:3]), _device(*ends[3:])
    print("ready", flush=True)
    _relay(fds, float(delay_ms) / 1000, float(loss_percent) / 100)


if __name__ == "__main__":
    main(*sys.argv[1:])
