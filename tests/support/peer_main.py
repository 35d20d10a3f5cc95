"""The other end of ``peers.Peer``: a process that runs functions it is told, each on a thread of its own.

Started as ``python -m tests.support.peer_main FD``. Functions travel by reference (tests only).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from llm_datadist.testing.stopwatch import own_wait
from tests.support import wire
from tests.support.world import World

PREFIX = "harness-"


class _Server:
    def __init__(self, fd: int) -> None:
        self._conn = Connection(fd)
        self._sending = threading.Lock()
        self._world = World()
        self._main: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Reads requests on a thread, so that the main one is free for calls that need it."""
        threading.Thread(target=self._read, name=PREFIX + "reader", daemon=True).start()
        self._send(("ready", None, None, 0.0, {}))
        while (request := self._main.get()) is not None:
            self._run(*request)

    def _read(self) -> None:
        while True:
            try:
                request = wire.receive(self._conn)
            except Exception as exc:
                if not isinstance(exc, (EOFError, OSError)):
                    traceback.print_exc()  # a request that cannot be read: nobody else would say so
                self._main.put(None)
                return
            number, on_main, *call = request
            if on_main:
                self._main.put((number, *call))
            else:
                threading.Thread(
                    target=self._run, args=(number, *call), name=f"{PREFIX}call-{number}", daemon=True
                ).start()

    def _run(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = error = failure = None
        began = time.monotonic()
        try:
            value = func(self._world, *args, **kwargs)
        except BaseException as exc:  # whatever it is, it belongs to the caller
            error = exc
        took = (time.monotonic() - began, {threading.get_native_id(): own_wait()})  # this thread ends now
        if error is not None:
            failure = (error, error.__cause__, "".join(traceback.format_exception(error)))
        try:
            self._send((number, value, failure, *took))
        except Exception as exc:
            text = f"the result of {func} cannot travel: {exc!r}; {value!r}, {failure!r}"
            self._send((number, None, (RuntimeError(text), None, ""), *took))

    def _send(self, reply: tuple[Any, ...]) -> None:
        with self._sending:
            wire.send(self._conn, reply)


if __name__ == "__main__":
    _Server(int(sys.argv[1])).serve()
