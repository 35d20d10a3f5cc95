"""Addresses that behave badly, and raw bytes to an engine's port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def swallowing_address() -> Iterator[tuple[str, int]]:
    """A listening socket with a full accept queue: a connect to it hears nothing."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(16):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


@contextlib.contextmanager
def silent_peer() -> Iterator[tuple[str, int]]:
    """Accepts (the kernel does), never says a byte."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()


def refusing_address() -> tuple[str, int]:
    """Nothing listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address: tuple[str, int] = probe.getsockname()
    return address


def unread(port: int) -> int:
    """Bytes that have arrived at connections of a listening port, and that its process has not read."""
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    return sum(int(row[4].split(":")[1], 16) for row in rows if row[1].endswith(f":{port:04X}"))


def is_closed_by_peer(sock: socket.socket, within: float) -> bool:
    """Whether the other side closes the connection in time; what it says before does not matter."""
    sock.settimeout(within)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
