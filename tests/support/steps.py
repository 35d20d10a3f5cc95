"""Interrupts a call at a step of its own thread where the interpreter looks for signals.

That is when a function begins, after each call, and where a loop goes round; not between ``__enter__`` of a lock and
the body of its ``with``, nor between the last call of a function and its return.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import llm_datadist

PACKAGE = str(Path(llm_datadist.__file__).parent)
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
        self._latest: dict[FrameType, str] = {}

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
        if what == "call" or (what == "opcode" and self._latest.get(frame, "").startswith(_LOOKS)):
            self._step(frame)
        if what == "opcode":
            opcode, before = dis.opname[frame.f_code.co_code[frame.f_lasti]], self._latest.get(frame)
            # Newer interpreters call ``__enter__`` like that; a lock taken there would never be released.
            self._latest[frame] = "enter" if before == "LOAD_SPECIAL" else opcode
        return self._trace

    def _step(self, frame: FrameType) -> None:
        self._count += 1
        if self._count not in self._numbers:
            return
        self.where.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if self._count == self._numbers[-1]:
            sys.settrace(None)
        self._strike()


def _interrupt() -> None:
    raise KeyboardInterrupt
