"""A process that goes on as another user, once it has loaded what it needs.

Not one that this user starts: an interpreter in a home folder, where pyenv and uv put it, is only for its owner.
"""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.support.world import World

NOBODY = 65534
_PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def become() -> None:
    """All threads of this process are nobody's from now on, and it is dumpable, as if that user had started it."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def become_in(w: World) -> None:
    """``become``, in a peer."""
    become()
