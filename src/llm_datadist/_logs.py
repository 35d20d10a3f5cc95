"""Loggers whose calls never raise: a handler of the user's that fails must not fail a transfer, or half of a link."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


# Frames between a caller and ``Logger``. Up to 3.10 one of ``logging`` counts as well, that of ``LoggerAdapter.log``.
_FRAMES = 2 if sys.version_info >= (3, 11) else 3


def get_logger(name: str) -> _Adapter:
    """The logger of that name, for all code of this package."""
    return _Quiet(logging.getLogger(name), {})


class _Quiet(_Adapter):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """What all other calls come to."""
        with suppress(Exception):
            if self.isEnabledFor(level):
                super().log(level, msg, *map(_in_one_line, args), **{**kwargs, "stacklevel": _FRAMES})


def _in_one_line(arg: object) -> object:
    """What a peer has sent ends no line of the log, begins none, and steers no terminal."""
    if isinstance(arg, (int, float)):
        return arg
    text = str(arg)
    if text.isprintable():
        return arg
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
