"""A TCP proxy: what it accepts it passes on, so that the two ends see another connection each."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def proxy(target: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """Where it listens."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, theirs:
        thread = threading.Thread(target=_run, args=(listener, theirs, target), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()


def _run(listener: socket.socket, stop: socket.socket, target: tuple[str, int]) -> None:
    other: dict[socket.socket, socket.socket] = {}
    while True:
        ready, _, _ = select.select([stop, listener, *other], [], [])
        if stop in ready:
            break
        for sock in ready:
            if sock is listener:
                near, far = listener.accept()[0], socket.create_connection(target)
                other |= {near: far, far: near}
            elif sock in other:
                _pass_on(sock, other)
    for sock in other:
        sock.close()


def _pass_on(sock: socket.socket, other: dict[socket.socket, socket.socket]) -> None:
    data = b""
    with contextlib.suppress(OSError):
        data = sock.recv(1 << 16)
        other[sock].sendall(data)
    if not data:
        for end in (sock, other[sock]):
            del other[end]
            end.close()
