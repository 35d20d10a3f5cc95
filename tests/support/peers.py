"""Real peer processes: run functions of test modules in a clean interpreter with a state of its own.

``p.call(func, *args)`` runs ``func(world, *args)`` there and returns or raises what it did;
``p.start`` returns a ``Running`` at once; ``p.attempt`` turns the result into an ``Outcome``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support import stopping, wire

ROOT = Path(__file__).resolve().parents[2]
CALL_TIMEOUT = 40.0


@dataclass(frozen=True)
class Outcome:
    """How a call ended: its value or its error, and what it took in the peer."""

    value: Any
    error: BaseException | None
    took: Taken

    @property
    def elapsed(self) -> float:
        """Seconds by the clock, for what a call must take at least."""
        return self.took.elapsed

    @property
    def code(self) -> LLMStatusCode | None:
        """SUCCESS, the status code of an LLMException, None for any other exception."""
        if self.error is None:
            return LLMStatusCode.LLM_SUCCESS
        return self.error.status_code if isinstance(self.error, LLMException) else None

    @property
    def text(self) -> str:
        return str(self.error) if self.error is not None else ""

    def expect(self, code: LLMStatusCode, *parts: object) -> Outcome:
        """Fails unless the call ended with ``code`` and its text holds every part."""
        assert self.code == code, (
            f"expected {code}, got {self.error!r}" if self.error else f"got {self.value!r}"
        )
        for part in parts:
            assert str(part) in self.text, f"{part!r} is not in {self.text!r}"
        return self

    def raised(self, kind: type[BaseException], *parts: object) -> Outcome:
        """Fails unless exactly this kind of exception (or a subclass) came, with every part in its text."""
        assert isinstance(self.error, kind), f"expected {kind.__name__}, got {self!r}"
        for part in parts:
            assert str(part) in self.text, f"{part!r} is not in {self.text!r}"
        return self

    def ok(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Running:
    """A call under way in a peer."""

    def __init__(self, future: Future[Outcome]) -> None:
        self._future = future

    def outcome(self, timeout: float = CALL_TIMEOUT) -> Outcome:
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as exc:
            raise TimeoutError(f"the call in the peer is still running after {timeout} s") from exc

    def result(self, timeout: float = CALL_TIMEOUT) -> Any:
        return self.outcome(timeout).ok()

    def done(self) -> bool:
        return self._future.done()


@dataclass(frozen=True)
class _Call:
    """One that has no answer yet."""

    future: Future[Outcome] = field(default_factory=Future)
    watch: Stopwatch | None = field(default_factory=Stopwatch)

    def took(self, seconds: float | None = None, waits: Mapping[int, int] | None = None) -> Taken:
        """What it took in the peer, if that can say so; without a watch nobody asks."""
        if self.watch is None:
            return Taken(seconds or 0.0, 0.0)
        taken = self.watch.took(more=waits)
        return taken if seconds is None else Taken(seconds, taken.stalled)


def _unmeasured() -> _Call:
    return _Call(watch=None)


class PeerDied(Exception):  # noqa: N818 - an event, not always an error of the test
    """The process ended while a call was under way."""


class Peer:
    """One process. Close it (or use ``with``): it is killed and reaped, whatever it does.

    Args:
        prefix: A command to start it under (``ip netns exec X``, ``setpriv …``).
        env: Environment variables to add; the value None removes one.
        python: The interpreter.
    """

    def __init__(
        self,
        prefix: Sequence[str] = (),
        env: dict[str, str | None] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.env = dict(env or {})
        self.plain = not prefix and python == sys.executable
        ours, theirs = socket.socketpair()
        values = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        values |= {"OPENBLAS_NUM_THREADS": "1", **{k: v for k, v in (env or {}).items() if v is not None}}
        for name in (k for k, v in (env or {}).items() if v is None):
            values.pop(name, None)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, python, "-m", "tests.support.peer_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=values,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self._socket = ours
        self._conn = Connection(os.dup(ours.fileno()))
        self._sending = threading.Lock()
        self._waiting: dict[Any, _Call] = {"ready": _Call()}
        self._number = 0
        self._stopped = False
        self._reader = threading.Thread(target=self._read, name=f"peer-{self.pid}", daemon=True)
        self._ready = self._waiting["ready"].future
        self._reader.start()

    def start(self, func: Callable[..., Any], /, *args: Any, on_main: bool = False, **kwargs: Any) -> Running:
        return self._start(_Call, func, args, on_main, kwargs)

    def _start(
        self,
        make: Callable[[], _Call],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        on_main: bool,
        kwargs: dict[str, Any],
    ) -> Running:
        self._ready.result(CALL_TIMEOUT)
        call = make()
        with self._sending:
            self._number += 1
            number = self._number
            self._waiting[number] = call
            try:
                wire.send(self._conn, (number, on_main, func, args, kwargs))
            except OSError as exc:
                self._waiting.pop(number, None)
                raise PeerDied(f"peer {self.pid} is gone") from exc
        if self._process.poll() is not None:
            self._fail_waiting()
        return Running(call.future)

    def call(
        self, func: Callable[..., Any], /, *args: Any, timeout: float = CALL_TIMEOUT, **kwargs: Any
    ) -> Any:
        """Its result. What it took is not measured: with all processes of a test that costs more than most calls."""
        return self._start(_unmeasured, func, args, False, kwargs).result(timeout)

    def attempt(
        self, func: Callable[..., Any], /, *args: Any, timeout: float = CALL_TIMEOUT, **kwargs: Any
    ) -> Outcome:
        return self.start(func, *args, **kwargs).outcome(timeout)

    def _read(self) -> None:
        while True:
            try:
                number, value, failure, seconds, waits = wire.receive(self._conn)
            except (EOFError, OSError):
                self._fail_waiting()
                return
            call = self._waiting.pop(number, None)
            if call is not None:
                call.future.set_result(Outcome(value, _error(failure), call.took(seconds, waits)))

    def _fail_waiting(self) -> None:
        for number in list(self._waiting):
            call = self._waiting.pop(number, None)
            if call is not None:
                died = PeerDied(f"peer {self.pid} ended during the call")
                call.future.set_result(Outcome(None, died, call.took()))

    def stop(self) -> None:
        """SIGSTOP, and waits until the process is stopped."""
        stopping.stop(self.pid)
        self._stopped = True

    def cont(self) -> None:
        """SIGCONT."""
        stopping.cont(self.pid)
        self._stopped = False

    def interrupt(self) -> None:
        """SIGINT: KeyboardInterrupt in the main thread's call."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL; the process is gone when this returns."""
        self._process.kill()
        self._process.wait()
        self._socket.shutdown(socket.SHUT_RDWR)  # a child of the peer may hold its end open

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._stopped

    def close(self) -> None:
        self.kill()
        self._reader.join()
        self._conn.close()
        self._socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _error(failure: tuple[BaseException, BaseException | None, str] | None) -> BaseException | None:
    if failure is None:
        return None
    error, cause, text = failure
    error.__cause__ = cause
    if hasattr(error, "add_note"):
        error.add_note("in the peer:\n" + text)
    return error
