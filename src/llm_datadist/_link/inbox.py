"""What comes in on one connection, in the order in which it is to be handled.

Strategy: a peer that leaves our answers unread gets no more of them: what would be answered waits. All else goes on,
above all the answers to our own questions, so that two sides that owe each other much do not wait for each other:
each goes on reading, which is what makes room at the other. What waits is bounded; beyond that nothing is read.
Invariants: questions keep their order; so do a Finish and its Decided.
Threads: control thread, but for ``waiting_nbytes``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from llm_datadist._core import limits
from llm_datadist._link.outbox import Outbox
from llm_datadist._wire import messages as m
from llm_datadist._wire.framing import Buffer
from llm_datadist._wire.session import AnswerIn, Event, MessageIn, PingIn, Session

_OBJECTS_NBYTES = 1 << 10  # of a small message that waits
# Not answered. Any message that is not here, or is new, waits.
_STATEMENTS = (m.Release, m.Announce, m.Withdraw, m.Publish, m.Offer, m.EndOffer, m.NeedConnections)


class Inbox:
    """The events of a session.

    Args:
        session: Of the connection.
        outbox: Of the same.
        expects: Whether somebody waits for the answer with this id; else it may have to be answered itself.
    """

    def __init__(self, session: Session, outbox: Outbox, expects: Callable[[int], bool]) -> None:
        self._session = session
        self._outbox = outbox
        self._expects = expects
        self._held: deque[tuple[Event, int]] = deque()
        self._held_nbytes = 0
        self._finishes: set[int] = set()  # that are held
        self._released = 0

    @property
    def holds(self) -> bool:
        """Whether something waits until the peer has read its answers."""
        return bool(self._held)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more is to be read."""
        return self._held_nbytes > limits.HELD_NBYTES and self._outbox.owes

    @property
    def more(self) -> bool:
        """Whether something has come that may be handled now: call ``receive`` with nothing new."""
        return self._session.more or (bool(self._held) and not self._outbox.owes)

    @property
    def taken(self) -> int:
        """Messages so far; those that had to wait count twice."""
        return self._session.frames_in + self._released

    @property
    def waiting_nbytes(self) -> int:
        """That have come, and were not handled yet."""
        return self._session.waiting_nbytes + self._held_nbytes

    def receive(self, data: Buffer, now: float, most: int) -> Iterator[Event]:
        """Takes received bytes, nothing where there is ``more``; what is to be handled of them, ``most`` at once.

        A thread that sends may have made it ``more`` since it was asked: bytes are taken in any case.
        """
        if not data and self._held and not self._outbox.owes:
            yield from self._release(most)
            return
        for event in self._session.receive(data, now, most):
            if (self._held or self._outbox.owes) and self._waits(event):
                self._hold(event)
            else:
                yield from self._now(event)

    def clear(self) -> None:
        """Forgets what waits."""
        self._held.clear()
        self._held_nbytes = 0

    def _waits(self, event: Event) -> bool:
        """Whether it would be answered."""
        match event:
            case PingIn():
                return True
            case MessageIn(frame) if isinstance(frame.message, m.Decided):
                return frame.message.finish_id in self._finishes
            case MessageIn(frame):
                return not isinstance(frame.message, _STATEMENTS)
            case AnswerIn(number, frame):  # a lease that nobody waits for any more is given back
                return isinstance(frame.message, m.Grant) and not self._expects(number)
            case _:
                return False

    def _hold(self, event: Event) -> None:
        nbytes = _OBJECTS_NBYTES
        if isinstance(event, MessageIn | AnswerIn):
            nbytes += event.frame.nbytes
            if isinstance(event.frame.message, m.Finish):
                self._finishes.add(event.frame.message.id)
        self._held.append((event, nbytes))
        self._held_nbytes += nbytes

    def _release(self, most: int) -> Iterator[Event]:
        while most > 0 and self._held and not self._outbox.owes:
            event, nbytes = self._held.popleft()
            self._held_nbytes -= nbytes
            self._released += 1
            most -= 1
            if not self._held:
                self._finishes.clear()
            yield from self._now(event)

    def _now(self, event: Event) -> Iterator[Event]:
        if isinstance(event, PingIn):
            self._session.pong(event.id)
        else:
            yield event
