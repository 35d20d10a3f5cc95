"""The one-instance rule, and the end of what a script forgot to finalize.

Invariants: an initialised object is held here until it is finalized, so that the exit hook finds it; a
forked child starts with nothing, its parent's objects are not its own. Threads: any.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from typing import Protocol

from llm_datadist.status import LLMException, LLMStatusCode


class Finalizable(Protocol):
    """What can be held here."""

    def finalize(self) -> None:
        """Ends it; idempotent."""


new_life_lock = threading.Lock
"""Makes the lock that orders init and finalize of one object."""

_lock = threading.Lock()
_live: dict[int, Finalizable] = {}
_hooked = False


def claim(owner: Finalizable, *, beside_others: bool) -> None:
    """Counts ``owner`` as initialised.

    Raises:
        LLMException: LLM_FAILED: another one is, and ``beside_others`` is False.
    """
    with _lock:
        if _live and not beside_others:
            raise LLMException(
                "another LLMDataDist is initialised in this process; finalize it first, or set the option "
                "llm.AllowMultipleInstances to '1' (LLMConfig.allow_multiple_instances = True)",
                status_code=LLMStatusCode.LLM_FAILED,
            )
        _hook()
        _live[id(owner)] = owner


def release(owner: Finalizable) -> None:
    """``owner`` is initialised no more."""
    with _lock:
        _live.pop(id(owner), None)


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_finalize_all)
        os.register_at_fork(after_in_child=_forget)


def _finalize_all() -> None:
    with _lock:
        left = list(_live.values())
    for owner in left:
        with suppress(Exception):  # the others must have their turn, and nobody is left to read it
            owner.finalize()


def _forget() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _live.clear()
