"""Which locks the main thread holds where it looks for signals, but for guards and those of one call."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.steps import PACKAGE, Steps

_Lock = threading.Lock
_FEW = {"during"}  # whose locks nobody waits for


class Held(Steps):
    """Notes them at each step of a call.

    Attributes:
        seen: File, line and function of each such step.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.held: list[object] = []
        self.seen: set[tuple[str, int, str]] = set()

    def _step(self, frame: FrameType) -> None:
        if self.held:
            self.seen.add((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


class _Watched:
    """A lock that notes when the main thread is within it."""

    def __init__(self, watch: Held) -> None:
        self._lock = _Lock()
        self._watch = watch
        self._counts = sys._getframe(2).f_code.co_name not in _FEW
        self.acquire, self.release, self.locked = self._lock.acquire, self._lock.release, self._lock.locked

    def _is_noted(self) -> bool:
        return self._counts and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> bool:
        self._lock.acquire()
        if self._is_noted():
            self._watch.held.append(self)
        return True

    def __exit__(self, *_: object) -> None:
        if self._is_noted():
            self._watch.held.remove(self)
        self._lock.release()


class _Threading:
    """The module, with such locks."""

    def __init__(self, lock: Callable[[], _Watched]) -> None:
        self.Lock = lock

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


@contextmanager
def watched() -> Iterator[Held]:
    """Locks that are made meanwhile are."""
    watch = Held()

    def lock() -> _Watched:
        return _Watched(watch)

    with pytest.MonkeyPatch.context() as patch:
        for path in Path(PACKAGE).rglob("*.py"):  # not all of its folders are packages
            name = ".".join(path.relative_to(Path(PACKAGE).parent).with_suffix("").parts)
            if ".testing" in name or path.stem.startswith("__"):
                continue
            loaded = importlib.import_module(name)
            if getattr(loaded, "threading", None) is threading:
                patch.setattr(loaded, "threading", _Threading(lock))
            if getattr(loaded, "Lock", None) is _Lock:
                patch.setattr(loaded, "Lock", lock)
        yield watch


def run_watched(watch: Held, call: Callable[[], object]) -> None:
    watch.run(call)
    assert not watch.held
