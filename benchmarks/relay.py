"""A relay between two ends of TCP connections that counts what the dialling side sends."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK = 1 << 20


class Relay:
    """Listens on loopback; ``to`` says where its connections go on to."""

    def __init__(self) -> None:
        self.sent = 0  # bytes from those who dialled
        self._to: tuple[str, int]
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def to(self, address: tuple[str, int]) -> tuple[str, int]:
        """Relays to this address from now on; where to dial instead of it."""
        self._to = address
        threading.Thread(target=self._accept, daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._copy, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, False), daemon=True).start()

    def _copy(self, here: socket.socket, there: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(_CHUNK):
                self.sent += len(data) if counts else 0
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
