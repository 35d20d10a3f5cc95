"""A process that reads with transport ``nixl``, driven line by line as an owner is."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import FILL, extents
from llm_datadist.testing.owner import Memory, OwnerProcess, pattern, serve
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_channel import NixlChannel
from llm_datadist.transports.seam import Fault, Progress
from tests.support.memory import bytes_at
from tests.support.nixl_pair import OPEN_S, NixlOwner, endpoint, environment, region, transport

BLOCK = 16 << 10


class Reader:
    """Its commands."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._reader: NixlTransport = transport()
        self._channel: NixlChannel | None = None
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread()

    def open(self, blob: str, within_host: bool = True) -> None:
        told = dataclasses.replace(endpoint(base64.b64decode(blob)), within_host=within_host)
        self._channel = self._reader.open(told, deadline=time.monotonic() + OPEN_S)

    def admit(self, token: str) -> None:
        assert self._channel is not None
        self._channel.admit(base64.b64decode(token))

    def map(self, nbytes: int) -> None:
        self._here = bytes_at(self._memory.map_sparse(nbytes), nbytes)
        self._here[:] = FILL
        self._reader.register(region(int(self._here.ctypes.data), nbytes=nbytes))

    def read(self, there: int, nbytes: int, time_s: float) -> dict[str, Any]:
        """In blocks that change places, so that it is not one range."""
        assert self._channel is not None
        runs = [(at, min(BLOCK, nbytes - at)) for at in range(0, nbytes, BLOCK)]
        order = [*runs[1::2], *runs[::2]]
        address = int(self._here.ctypes.data)
        plan = Segments(extents([there], order), extents([address], order))
        began = time.monotonic()
        progress = self._channel.read(plan).wait(deadline=began + time_s)
        return {**_told(progress), "took_s": time.monotonic() - began}

    def begin(self, **args: Any) -> None:
        """A ``read`` in a thread; returns when its first byte has arrived."""
        self._thread = threading.Thread(target=lambda: self._answer.update(self.read(**args)))
        self._thread.start()
        while self._thread.is_alive() and not (self._here[::BLOCK] != FILL).any():
            time.sleep(0.0005)

    def end(self) -> dict[str, Any]:
        self._thread.join()
        return self._answer

    def changed(self) -> int:
        return int(np.count_nonzero(self._here != FILL))

    def refill(self) -> None:
        self._here[:] = FILL

    def holds(self, seed: int, nbytes: int) -> bool:
        return bool(np.array_equal(self._here[:nbytes], pattern(seed, nbytes)))

    def word(self, address: int) -> Any:
        assert self._channel is not None
        found = self._channel.read_word(address, deadline=time.monotonic() + OPEN_S)
        return _told(Progress(0, found)) if isinstance(found, Fault) else found

    def close(self) -> None:
        assert self._channel is not None
        self._channel.close()

    def fork(self) -> int:
        """Exit status of a child that closes as the engine's does and then ends like any program."""
        pid = os.fork()
        if pid == 0:
            self._reader.close_after_fork()
            self._reader.close()
            sys.exit(0)
        return os.waitpid(pid, 0)[1]

    def cpu_s(self) -> float:
        return time.process_time()

    def state(self) -> dict[str, Any]:
        return {
            "torch": "torch" in sys.modules,
            "handlers": [type(handler).__name__ for handler in logging.getLogger().handlers],
            "raise": logging.raiseExceptions,
        }


class NixlReader(OwnerProcess):
    """The process, as a test sees it."""

    def __init__(self, argv: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        super().__init__([*argv, sys.executable, __file__], env=environment(env))

    def link(self, owner: NixlOwner) -> None:
        self.call("open", blob=base64.b64encode(owner.endpoint.blob).decode())

    def admit(self, token: bytes) -> None:
        self.call("admit", token=base64.b64encode(token).decode())


def _told(progress: Progress) -> dict[str, Any]:
    fault = progress.fault
    return {"nbytes": progress.nbytes, "fault": fault and fault.kind.name, "text": fault and fault.text}


def _main() -> None:
    logging.basicConfig()
    reader = Reader()
    names = [name for name in dir(reader) if not name.startswith("_")]
    serve({name: getattr(reader, name) for name in names})


if __name__ == "__main__":
    _main()
