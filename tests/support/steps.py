"""Interrupts a call at a step of its own thread where the interpreter looks for signals.

That is when a function begins, after each call, and where a loop goes round; not between ``__enter__`` of a lock and
the body of its ``with``, nor between the last call of a function and its return. What is raised there is handled where
the call is, so it is left out where the next step is handled elsewhere: after the last call within a ``with``.
"""

from __future__ import annotations

import _thread
import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import llm_datadist

PACKAGE = str(Path(llm_datadist.__file__).parent)
_BOTH = (signal.SIGUSR1, signal.SIGUSR2)
_SWITCH_S = sys.getswitchinterval()
_LOOKS = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Steps:
    """Raises KeyboardInterrupt at the steps with these numbers, counted from 1 over the whole call.

    Args:
        numbers: Of the steps.
        files: Ends of the names of the files whose steps count; empty: all of the package.
        strike: What is done at those steps instead.

    Attributes:
        where: File, line and function of each interrupt.
    """

    def __init__(
        self, *numbers: int, files: str | tuple[str, ...] = "", strike: Callable[[], None] | None = None
    ) -> None:
        self.where: list[tuple[str, int, str]] = []
        self._numbers = sorted(numbers)
        self._files = files
        self._strike = strike or _interrupt
        self._count = 0
        self._latest: dict[
            FrameType, tuple[str, int | None]
        ] = {}  # opcode, and the handler of what it raises

    def run(self, call: Callable[[], object]) -> bool:
        """Whether that was raised; if not, it has fewer steps."""
        before = sys.gettrace()
        sys.setprofile(self._profile if len(self._numbers) > 1 else None)
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            sys.setprofile(None)
            self._latest.clear()
        return False

    def _profile(self, frame: FrameType, what: str, _: Any) -> None:
        """The second one: the interpreter forgets a trace function that has raised."""
        if self.where and what in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self._step(frame)

    def _trace(self, frame: FrameType, what: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.endswith(self._files) if self._files else name.startswith(PACKAGE)):
            return None
        if frame.f_trace is None:  # Python 3.13 looks at the one when the other is set
            frame.f_trace = self._trace
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if what == "call":
            self._step(frame)
        if what == "opcode":
            before, handled = self._latest.get(frame, ("", None))
            handler = _handler(frame.f_code, frame.f_lasti)
            if before.startswith(_LOOKS) and handler == handled:
                self._step(frame)
            opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # Newer interpreters call ``__enter__`` like that; a lock taken there would never be released.
            self._latest[frame] = "enter" if before == "LOAD_SPECIAL" else opcode, handler
        return self._trace

    def _step(self, frame: FrameType) -> None:
        self._count += 1
        if self._count not in self._numbers:
            return
        self.where.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if self._count == self._numbers[-1]:
            sys.settrace(None)
        self._strike()


@functools.cache
def _handler(code: CodeType, offset: int) -> int | None:
    """Where what is raised at this opcode goes on; before 3.11 the interpreter knows by itself."""
    if sys.version_info >= (3, 11):
        for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
            if entry.start <= offset < entry.end:
                return int(entry.target)
    return None


@contextmanager
def signals_elsewhere() -> Iterator[None]:
    """Within it the main thread gets neither of the ``two_signals``, and both are KeyboardInterrupts."""
    before = {number: signal.signal(number, _on_signal) for number in _BOTH}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BOTH)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def two_signals() -> None:
    """Two signals come at once, each of whose handlers raises KeyboardInterrupt. For the main thread.

    Another thread gets them, so that it is the interpreter that looks for them, again and again, and no call of C: see
    ``signals_elsewhere``.
    """
    sent = threading.Lock()
    sent.acquire()

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BOTH)
        for number in _BOTH:
            signal.pthread_kill(threading.get_ident(), number)
        sys.setswitchinterval(_SWITCH_S)
        sent.release()

    sys.setswitchinterval(1)  # nobody comes between the two
    _thread.start_new_thread(send, ())
    sent.acquire()


def _on_signal(*_: object) -> None:
    raise KeyboardInterrupt


def _interrupt() -> None:
    raise KeyboardInterrupt
