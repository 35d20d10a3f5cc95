"""How calls of peers end here: what each has asked to be made ready, until its initiator has decided.

A call has one outcome, and its initiator decides it, for only it knows whether the call was cut off or late
(``_engine/obligations.py``). We have made sure before that we can do our part: its place in the queue of
notifications is taken, its lease is ended, and its request key and pages stay until we hear.
If the link ends first: a peer that has said goodbye had failed its calls by then. Any other may have reported
success a moment ago, so what was made ready happens: nothing is held for ever.
Threads: control thread; ``park`` from any.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from llm_datadist._core import limits
from llm_datadist._core.leases import Lease
from llm_datadist._core.notices import Notice, NoticeQueue, check_notice
from llm_datadist._engine.allocating import Allocator
from llm_datadist._engine.state import State, describe, peer_of, tell
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._wire.messages import Decided, Done, Finish
from llm_datadist.clusters import Notify
from llm_datadist.status import (
    CacheNotExistError,
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    OutOfMemoryError,
    ParamInvalidError,
)

Ticket: TypeAlias = tuple[Link, int]  # a link, and the id of a Finish or an Offer that came over it


@dataclass(frozen=True, slots=True)
class _Read:
    """A complete read that releases its key."""

    lease: Lease
    first_tensor: int
    tensor_stop: int


class Endings:
    """Of the calls of this engine's peers."""

    def __init__(self, state: State, allocator: Allocator, queue: NoticeQueue) -> None:
        self._state = state
        self._allocator = allocator
        self._queue = queue
        self._ready: dict[Ticket, _Read | None] = {}
        self._reads: Counter[Link] = Counter()  # of these

    @property
    def pending(self) -> bool:
        """Whether anything waits for its decision."""
        return bool(self._ready)

    def finish(self, link: Link, message: Finish) -> None:
        """Makes ready what a call ends with, all of it or nothing."""
        state, ticket = self._state, (link, message.id)
        try:
            notify = _checked(link, *message.notify) if message.notify is not None else None
            with state.lock:
                state.check_open()
                if ticket in self._ready:
                    raise ParamInvalidError(f"the end of call {message.id} was asked for already")
                if self._reads[link] >= limits.UNDECIDED:
                    raise OutOfMemoryError(
                        f"{limits.UNDECIDED} reads of this link wait there for their outcome"
                    )
                lease = self._ended_lease(link, message.lease_id) if message.lease_id else None
                if notify is not None:
                    self._queue.park(ticket, notify, alone=state.is_alone(link))
                read = None
                if lease is not None and lease.key is not None:
                    read = _Read(lease, message.first_tensor, message.tensor_stop)
                if notify is not None or read is not None:
                    self._ready[ticket] = read
                    self._reads[link] += read is not None
        except LLMException as exc:
            tell(link, Done(id=message.id, code=exc.status_code, text=str(exc)))
            return
        if lease is not None:
            peer_of(link).count_out(message.nbytes)
        tell(link, Done(id=message.id, code=LLMStatusCode.LLM_SUCCESS))

    def _ended_lease(self, link: Link, lease_id: int) -> Lease:
        """The lease of a read, which has ended by that. The caller holds the lock."""
        state = self._state
        lease = state.leases.get(lease_id, link.token, time.monotonic())
        if lease is None:
            raise CacheNotExistError(f"lease {lease_id} has ended before its reader was done")
        state.leases.end(lease)
        state.condition.notify_all()
        return lease

    def decided(self, link: Link, message: Decided) -> None:
        """A call has its outcome; nothing if it is known already, or nothing was made ready."""
        self.decide((link, message.finish_id), ok=message.ok)

    def park(self, link: Link, offer_id: int, name: str, text: bytes, done: Done) -> None:
        """Makes the notification of a push ready, whose data is here, and posts the answer that says so.

        In one step for ``link_down``: a push whose initiator was not answered any more has failed.

        Raises:
            ParamInvalidError: Longer than is allowed, or there is one of that id.
            OutOfMemoryError: The queue is full.
            LinkFailedError: The link has ended, so that nobody will decide.
        """
        notify = _checked(link, name, text)
        with self._state.lock:
            if (link, offer_id) in self._ready:
                raise ParamInvalidError(f"the end of call {offer_id} was asked for already")
            self._queue.park((link, offer_id), notify, alone=self._state.is_alone(link))
            try:
                link.post(done)
            except LinkLost as exc:  # also when this side has said goodbye
                self._queue.withdraw((link, offer_id))
                raise LinkFailedError(f"{describe(link)}: the link went down: {exc}") from exc
            self._ready[link, offer_id] = None

    def decide(self, ticket: Ticket, *, ok: bool) -> None:
        """Does, or drops, what was made ready under that ticket."""
        with self._state.lock:
            read = self._ready.pop(ticket, None)
            self._reads[ticket[0]] -= read is not None
            if ok:
                self._queue.admit(ticket)
            else:
                self._queue.withdraw(ticket)
        if ok and read is not None and read.lease.key is not None:
            self._allocator.pulled(read.lease.record, read.lease.key, read.first_tensor, read.tensor_stop)

    def link_down(self, link: Link) -> None:
        """Nobody will decide any more."""
        with self._state.lock:
            undecided = [ticket for ticket in self._ready if ticket[0] is link]
        for ticket in undecided:
            self.decide(ticket, ok=not link.peer_left)
        del self._reads[link]


def _checked(link: Link, name: str, message: bytes) -> Notify:
    try:
        check_notice(Notice(name, message))
    except ParamInvalidError as exc:
        raise ParamInvalidError(f"a notification of {describe(link)}: {exc}") from exc
    return Notify(link.cluster_id, name, message)
