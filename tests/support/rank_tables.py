"""Rank tables for tests of the two-sided link."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


def device(device_id: int | str, rank_id: int | str, **more: Any) -> dict[str, Any]:
    """One device; ``more``: device_ip, listen_port and whatever else a table may hold."""
    return {"device_id": device_id, "rank_id": rank_id, **more}


def server(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One server; ``more``: server_id, host_ip."""
    return {"server_id": "node", **more, "device": list(devices)}


def rank_table(*servers: dict[str, Any]) -> str:
    return json.dumps({"server_list": list(servers)})


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens on; from below the range that the system gives to those who dial.

    Sessions of tests that run at the same time begin at different ones.
    """
    found: list[int] = []
    start = os.getpid() * 37 % 8000
    for port in range(20011 + start, 32000):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free port")


def on_loopback(*ports: int, device_ids: tuple[Any, ...] | None = None) -> str:
    """One server at 127.0.0.1, rank i listening on the i-th port."""
    ids = device_ids or tuple(range(len(ports)))
    return rank_table(
        server(
            *(device(d, r, listen_port=p) for r, (d, p) in enumerate(zip(ids, ports, strict=True))),
            server_id="127.0.0.1",
        )
    )
