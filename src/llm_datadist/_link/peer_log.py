"""Lines of the log that peers can cause: bounded for each address and in all, what is beyond is counted and told.

Threads: any. What was counted is told on the control thread when its minute is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from llm_datadist._core import limits
from llm_datadist._core.line_counts import LineCounts
from llm_datadist._logs import get_logger

CallAt: TypeAlias = Callable[[float, Callable[[], None]], object]
Logger: TypeAlias = "logging.LoggerAdapter[logging.Logger]"

_log = get_logger("llm_datadist.link")


class PeerLog:
    """Says what is to be said of peers.

    Args:
        call_at: Runs a function at an instant of ``time.monotonic()``.
    """

    def __init__(self, call_at: CallAt) -> None:
        self._call_at = call_at
        self._lock = threading.Lock()
        self._counts = LineCounts()
        self._timed = False

    def say(
        self, level: int, address: str, text: str, *args: object, log: Logger = _log, exc_info: bool = False
    ) -> None:
        """A line about the peer at ``address``, host and port."""
        kind = "lines" if level >= logging.WARNING else "events"  # which take no room from what is wrong
        self._say(log, level, kind, limits.LINES, address, text, args, exc_info)

    def refused(self, text: str, address: str, reason: str) -> None:
        """A link that the peer at ``address`` asked for did not come about; ``text`` has a place for both."""
        args = (address, reason)
        self._say(_log, logging.WARNING, "refused links", limits.REFUSALS, address, text, args, False)

    def _say(
        self,
        log: Logger,
        level: int,
        kind: str,
        most: int,
        address: str,
        text: str,
        args: tuple[object, ...],
        exc_info: bool,
    ) -> None:
        if not log.isEnabledFor(level):
            return
        said = (text % args if args else text)[: 2 * limits.LINE_CHARS - 200]
        with self._lock:
            admitted = self._counts.admit(address.rpartition(":")[0], kind, most, said, time.monotonic())
            set_timer = not self._timed and not admitted
            self._timed = self._timed or set_timer
        if admitted:
            log.log(level, "%s", said, exc_info=exc_info, stacklevel=3)
        if set_timer:
            self._call_at(time.monotonic() + limits.LINES_S, self._tell)

    def _tell(self) -> None:
        with self._lock:
            left = self._counts.ended(time.monotonic())
            again = self._counts.next_end
            self._timed = again is not None
        for what in left:
            _log.warning(
                "%d more %s about %s within %g s; the last: %s",
                what.more, what.kind, what.address, limits.LINES_S, what.last[: limits.LINE_CHARS],
            )  # fmt: skip
        if again is not None:
            self._call_at(again, self._tell)
