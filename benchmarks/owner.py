"""The owner process of the benchmarks: it serves the transports under test and the references beside them."""

from __future__ import annotations

import ctypes
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from benchmarks import api
from llm_datadist.testing import stream_owner
from llm_datadist.testing.owner import pattern
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.movers import Movers

_keep: list[Any] = []  # what must live as long as this process


def allocate(sizes: list[int], seed: int) -> list[int]:
    """Memory as callers have it: NumPy arrays (large pages where the system gives them), all touched."""
    arrays = [pattern(seed + i, size) for i, size in enumerate(sizes)]
    _keep.append(arrays)
    return [int(a.ctypes.data) for a in arrays]


def local_endpoint() -> str:
    """Makes this process readable by the transport ``local``; the endpoint, in hex."""
    selector = selectors.DefaultSelector()

    def adopt(sock: socket.socket, readable: Callable[[], None]) -> None:
        selector.register(sock, selectors.EVENT_READ, readable)

    def run() -> None:
        while True:
            for key, _ in selector.select():
                key.data()

    transport = LocalTransport(Movers(0), adopt, lambda sock: None, False, secrets.token_bytes)
    _keep.append(transport)
    threading.Thread(target=run, name="control", daemon=True).start()
    return transport.endpoint().hex()


def raw_listen(address: int, nbytes: int) -> int:
    """Plain TCP: each byte that comes in is answered with these bytes; the port."""
    data = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    listener = socket.create_server(("127.0.0.1", 0))
    _keep.append(listener)

    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sock.recv(1):
            sock.sendall(data)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def serve_engine(
    addresses: list[int], blocks: int, block_nbytes: int, backend: str, accessible: bool
) -> tuple[str, int] | None:
    """An engine that owns this memory; where it listens."""
    owner = api.serve(addresses, blocks, block_nbytes, backend, accessible)
    _keep.append(owner)
    return owner.listen_address


if __name__ == "__main__":
    stream_owner.main(
        {
            "allocate": allocate,
            "local_endpoint": local_endpoint,
            "raw_listen": raw_listen,
            "serve_engine": serve_engine,
        }
    )
