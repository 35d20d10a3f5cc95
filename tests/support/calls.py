"""Calls of the engine's parts whose callers wait for what comes out."""

from __future__ import annotations

from collections.abc import Callable


class Kept:
    """A call whose caller gets its result."""

    dropped = False

    def on_cut(self, cancel: Callable[[], object]) -> None:
        pass

    def on_drop(self, undo: Callable[[], object]) -> None:
        pass


KEPT = Kept()
