"""What a call of ours owes its peer: a lease that is to be given back, an outcome that is to be told.

Each is entered with the flight (``Flight.owes``) before the message that brings it about is sent, and settled
when the flight ends, by whatever: so no cut, time-out or interrupt falls between it and its owner. Settling
may be repeated, also when it was interrupted; the peer ignores what it has heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import tell
from llm_datadist._link.link import Link, LinkLost, NoAnswer
from llm_datadist._wire.messages import Decided, Done, Finish, Grant, Message, Release
from llm_datadist.status import LLMStatusCode


class Decision:
    """The outcome of one call, which its initiator decides: the first word counts, and the peer hears that one.

    Args:
        link: To the peer.
        message: What tells it.
    """

    def __init__(self, link: Link, message: Callable[[bool], Message]) -> None:
        self._link = link
        self._message = message
        self._first: dict[str, bool] = {}  # at most one entry: ``setdefault`` decides in one step
        self._told = False

    def make(self, *, ok: bool) -> bool:
        """Decides, unless it was decided before, and tells the peer; returns what was decided.

        Raises:
            LinkLost: Decided ``ok``, but this side has left the link, perhaps before the peer could hear of it.
        """
        decided = self._decide(ok)
        if decided and self._link.left:  # looked at last: what was posted before went before the goodbye
            raise LinkLost(f"the link to cluster {self._link.cluster_id} was dropped by this side")
        return decided

    def settle(self) -> None:
        """A call that has ended without a decision has failed."""
        self._decide(False)

    def _decide(self, ok: bool) -> bool:
        decided = self._first.setdefault("ok", ok)
        if not self._told:
            tell(self._link, self._message(decided))
            self._told = True
        return decided


class LeaseHold:
    """The lease that one pull asks for: whenever its grant comes, it is given back once the pull has ended."""

    def __init__(self, link: Link) -> None:
        self.pending = link.expect()
        self._link = link
        self.read_nbytes = 0
        self._over = False

    def end_elsewhere(self) -> None:
        """The peer has ended it with what it was told otherwise."""
        self._over = True

    def settle(self) -> None:
        """Gives it back, now or (``Handler``) when it comes."""
        frame = self.pending.close()
        if frame is not None and isinstance(frame.message, Grant) and not self._over:
            tell(self._link, Release(lease_id=frame.message.lease_id, nbytes=self.read_nbytes))
        self._over = True


def give_back(link: Link, grant: Grant) -> None:
    """Releases a grant that came when nobody waited for it any more."""
    tell(link, Release(lease_id=grant.lease_id))


class Ending:
    """The end of one call whose data is complete: its peer makes ready what comes with it, then we decide."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._link = flight.link
        self._pending = self._link.expect()
        self._decision = Decision(self._link, lambda ok: Decided(finish_id=self._pending.id, ok=ok))

    def run(self, message: Callable[[int], Finish], context: Context, deadline: float) -> None:
        """Asks and decides: when it returns the call has succeeded, whatever cuts it off later.

        Args:
            message: Made with the id that it must have.
            context: For the text of a refusal.
            deadline: Instant of ``time.monotonic()``.

        Raises:
            LinkLost: The link went down, or the flight was cut.
            NoAnswer: No answer by the deadline.
            LLMException: What the peer refused it with.
        """
        self._flight.owes(self._decision.settle)
        with self._flight.cancelling(self._pending.fail):
            self._link.ask(self._pending, message(self._pending.id))
            answer = self._wait(deadline)
        if not isinstance(answer, Done):
            raise context.lost(f"unexpected answer {type(answer).__name__}")
        if answer.code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST and time.monotonic() >= deadline:
            raise NoAnswer(answer.text)  # a lease ends with the time of its pull
        if answer.code != LLMStatusCode.LLM_SUCCESS:
            raise context.refused(answer.code, answer.text)
        self._decision.make(ok=True)

    def _wait(self, deadline: float) -> object:
        try:
            return self._pending.wait(deadline).message
        except NoAnswer:
            frame = self._pending.close()
            if frame is None:
                raise
            return frame.message  # it came at the last moment
