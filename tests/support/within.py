"""What a thread meets while it holds a guard, as in a signal handler that has interrupted a call of the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist import _waiting

REFUSED = "in a signal handler"


class Owner:
    """Of a guard."""


@contextmanager
def within() -> Iterator[None]:
    """This thread holds a guard, and another call is further out on its stack."""
    owner = Owner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_waiting, "_has_interrupted", lambda frame: True)
        with _waiting.guard(owner):
            yield
