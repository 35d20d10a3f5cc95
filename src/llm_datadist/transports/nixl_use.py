"""Who uses a session of transport ``nixl``: one read, which leaves it whatever breaks it off.

Strategy: a signal handler raises between any two calls of a reader, also before the first step of what would
undo what it has begun. A ``with`` of a plain lock is C and ends in any case. So a use counts as long as its
lock is held, and what it has entered it notes beforehand; one whose lock is free has no reader any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from llm_datadist._waiting import Lasting

Answer = TypeVar("Answer")


class Used(Protocol):
    """What a use may be of."""

    def leave(self, use: Use) -> None:
        """It uses it no more. Idempotent."""

    def has(self, use: Use) -> bool:
        """Whether it has not left, and the agent lives."""

    def doom(self) -> None:
        """Cuts all that is under way."""


class Use(Lasting):
    """What one read holds: of one session at a time, and a place for a few bytes. Made by ``used``.

    Attributes:
        session: That it has entered, or is about to.
        under_way: Whether a transfer may be: if it leaves so, the session is doomed.
    """

    __slots__ = ("session", "under_way")

    def __init__(self) -> None:
        super().__init__()
        self.session: Used | None = None
        self.under_way = False

    def leave(self) -> None:
        """The end of an ``enter``, if there was one. Idempotent; see ``Session.leave``."""
        session = self.session
        if session is not None:
            if self.under_way:
                session.doom()
            session.leave(self)
            self.session = None

    @property
    def is_settled(self) -> bool:
        """Whether it is over, and nothing of it writes any more."""
        session = self.session
        return self.is_over and (session is None or not session.has(self))


def used(call: Callable[[Use], Answer]) -> Answer:
    """Has it done by a use, which has left when this returns or raises."""
    use = Use()
    with use.during():
        try:
            try:
                return call(use)
            finally:
                use.leave()
        except BaseException:  # a signal handler's, which may have come before it left
            use.leave()
            raise
