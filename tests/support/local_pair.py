"""Pairs for transport ``local``: an owner process with a ``LocalTransport``, and a control loop for both."""

from __future__ import annotations

import base64
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from llm_datadist._core.segments import Extents
from llm_datadist.testing.owner import OwnerProcess, serve
from llm_datadist.transports.local import LocalChannel, LocalTransport
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import PeerEndpoint
from tests.support import other_user

PROOF = b"proof of this very connection..."


class Loop:
    """A control thread: what the engine's loop does for the transport."""

    def __init__(self) -> None:
        self._wake_read, self._wake_write = os.pipe()
        self._readers: dict[int, tuple[socket.socket, Callable[[], float | None]]] = {}
        self._resting: dict[int, float] = {}
        self.turns = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def adopt(self, sock: socket.socket, callback: Callable[[], float | None]) -> None:
        self._resting.pop(sock.fileno(), None)
        self._readers[sock.fileno()] = sock, callback
        os.write(self._wake_write, b"x")

    def drop(self, sock: socket.socket) -> None:
        self._readers.pop(sock.fileno(), None)
        os.write(self._wake_write, b"x")

    def close(self) -> None:
        os.write(self._wake_write, b"q")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            self._resting = {fd: end for fd, end in self._resting.items() if end > time.monotonic()}
            watched = [fd for fd in self._readers if fd not in self._resting]
            try:
                ready, _, _ = select.select(
                    [self._wake_read, *watched], [], [], 0.01 if self._resting else None
                )
            except OSError:  # one was dropped and closed just now
                continue
            if self._wake_read in ready and b"q" in os.read(self._wake_read, 100):
                return
            for fd in ready:
                adopted = self._readers.get(fd)  # an earlier callback may have dropped it
                if adopted is not None:
                    self.turns += 1
                    pause_s = adopted[1]()
                    if pause_s:
                        self._resting[fd] = time.monotonic() + pause_s


def nothing(*_: object) -> None:
    """An ``adopt_reader`` or ``drop_reader`` that does nothing: connections stay in the queue."""


def transport(movers: Movers, loop: Loop | None = None, *, allow_ptrace: bool = False) -> LocalTransport:
    adopt, drop = (loop.adopt, loop.drop) if loop else (nothing, nothing)
    return LocalTransport(movers, adopt, drop, allow_ptrace, secrets.token_bytes)


def endpoint(blob: bytes) -> PeerEndpoint:
    return PeerEndpoint(1, blob, b"", None, nothing, PROOF)


class LocalOwner(OwnerProcess):
    """An owner process that can be read with ``local``."""

    def __init__(self, argv: Sequence[str] | None = None, **popen: Any) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        super().__init__(argv or [sys.executable, __file__], env=env, **popen)
        self.endpoint = endpoint(base64.b64decode(self.call("endpoint")))

    def source(self, extents: Extents) -> Extents:
        return extents


class LocalPair(LocalOwner):
    """A ``testing.transports.Pair``."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._movers = Movers(threads - 1)
        self._movers.offer(nothing, threads - 1)  # starts them now, before a test counts its threads
        self._transport = transport(self._movers)
        self.channel: LocalChannel = self._transport.open(self.endpoint, deadline=0)

    def close(self) -> None:
        self._transport.close()
        self._movers.close()
        super().close()


def _main() -> None:
    if "nobody" in sys.argv:
        other_user.become()
    owned = transport(Movers(0), Loop())
    serve({"endpoint": lambda: base64.b64encode(owned.endpoint(PROOF)).decode()})


if __name__ == "__main__":
    _main()
