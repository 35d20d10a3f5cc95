"""Accepting connections, also when descriptors have run out: the same for every listener, whatever its family.

Strategy: a connection that cannot be accepted stays in the queue of the system, and its listener stays readable.
So the listener rests, out of the loop, and looks again: a short shortage costs a peer nothing but a wait. One
that goes on is told to peers: each connection is accepted with a spare descriptor, gets its refusal, and is closed.
Invariants: a connection is refused only if it could not be accepted, so one that comes after a shortage is taken;
a spare that is lost, because somebody else took what it had left free, is taken back as soon as one is.
Threads: the control thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING, Any

from llm_datadist._logs import get_logger
from llm_datadist._shortages import reason_of

if TYPE_CHECKING:
    import socket

ACCEPTS_PER_TURN = 8  # then the control thread looks after others; the listener stays readable
PAUSE_S = 0.1  # between two looks whether there are descriptors again
PATIENCE_S = 1.0  # for which connections wait in the queue before they are refused
_TELL_AGAIN_S = 60.0

_log = get_logger("llm_datadist.link")


class Accepting:
    """What is done when a listening socket is readable.

    Args:
        sock: It; non-blocking.
        where: Its name, in a log record.
        take: Takes over each connection, with the peer's address; may return for how long no more is to come.
        refuse: Tells a connection why it is not taken; it is closed afterwards.
        clock: The time now, seconds of a monotonic clock.

    Raises:
        OSError: There is no spare descriptor.
    """

    def __init__(
        self,
        sock: socket.socket,
        where: str,
        take: Callable[[socket.socket, Any], float | None],
        refuse: Callable[[socket.socket, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sock = sock
        self._where = where
        self._take = take
        self._refuse = refuse
        self._clock = clock
        self._short_since: float | None = None
        self._told_at = -_TELL_AGAIN_S
        self._spare: FileIO | None = _open_spare()

    def run(self, most: int = ACCEPTS_PER_TURN) -> float:
        """Accepts up to so many; for how long the listener must be left alone then, in seconds: mostly 0."""
        for _ in range(most):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                self._short_since = None  # a descriptor was there: the system looks for it first
                break
            except ConnectionError:  # gone before it was accepted
                continue
            except OSError as error:
                if self._sock.fileno() < 0:  # closed by what was accepted before
                    break
                if not self._turns_one_away(error):
                    return PAUSE_S
                continue
            self._short_since = None
            try:
                rest_s = self._take(sock, peer)
            except (OSError, MemoryError) as error:
                self._tell("a connection that came in at %s is refused: %s", error)
                with sock, suppress(OSError):
                    self._refuse(sock, reason_of(error))
                continue
            if rest_s:
                return rest_s
        self._take_spare_back()
        return 0.0

    def close(self) -> None:
        """Gives the spare descriptor back, also in a forked child. Idempotent."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _turns_one_away(self, error: OSError) -> bool:
        """Refuses one connection, if it has waited long enough; whether there may be another one."""
        now = self._clock()
        if self._short_since is None:
            self._short_since = now
        self._tell("cannot accept on %s: %s; connections wait", error)
        self._take_spare_back()
        if self._spare is None or now < self._short_since + PATIENCE_S:
            return False
        self.close()
        try:
            with self._sock.accept()[0] as sock, suppress(OSError):
                self._refuse(sock, reason_of(error))
            return True
        except OSError:  # nobody is left, or another thread has taken what was free
            return False
        finally:
            self._take_spare_back()

    def _tell(self, text: str, error: OSError | MemoryError) -> None:
        now = self._clock()
        if now >= self._told_at + _TELL_AGAIN_S:
            self._told_at = now
            _log.warning(text, self._where, reason_of(error))

    def _take_spare_back(self) -> None:
        if self._spare is None and self._sock.fileno() >= 0:
            with suppress(OSError):
                self._spare = _open_spare()


def _open_spare() -> FileIO:
    return FileIO("/dev/null")
