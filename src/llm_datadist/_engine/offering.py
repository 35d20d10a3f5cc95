"""One offer that we made to a peer: its parts, each under a lease of its own, and how it ends.

The lease word is what makes a withdrawal sound: it is cleared before a time-out is reported, so a
destination that finds the offer late (it was stopped, or the part was in a queue) never begins. Leases are found
by their giver, this offer, so that an interrupt leaves none without an owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llm_datadist._core.leases import Lease
from llm_datadist._core.notices import Notice
from llm_datadist._core.registry import KeyName, Record
from llm_datadist._core.requests import Layers
from llm_datadist._core.segments import U64
from llm_datadist._engine import codec
from llm_datadist._engine.failures import Context, Refusal
from llm_datadist._engine.obligations import Decision
from llm_datadist._engine.state import State, peer_of
from llm_datadist._link.link import Link, Pending
from llm_datadist._wire.messages import Done, EndOffer, Offer, PartReady, Publish, Withdraw
from llm_datadist.status import CacheNotExistError, LLMException

_FOR_EVER = float("inf")  # these leases end when we end them


def _no_numbers() -> U64:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class OfferTerms:
    """What is offered; see ``_wire.messages.Offer``."""

    kind: str
    part_tensors: int
    layers: Layers
    target: tuple[KeyName, int] | None = None
    addresses: U64 = field(default_factory=_no_numbers)
    source_batch: int = 0
    src_blocks: U64 = field(default_factory=_no_numbers)
    dst_blocks: U64 = field(default_factory=_no_numbers)
    unit_nbytes: int = 0
    notice: Notice | None = None


class Offering:
    """An offer under way. Used by one thread at a time."""

    def __init__(self, state: State, link: Link, record: Record, terms: OfferTerms) -> None:
        self._state = state
        self._link = link
        self._record = record
        self._terms = terms
        self._offer_id = link.next_id()
        self._posted = False
        self._decision = Decision(link, lambda ok: EndOffer(offer_id=self._offer_id, ok=ok))

    def send_part(self, part: int, time_left_ms: int) -> tuple[Pending, Lease]:
        """Lets the peer read a part; the first one goes out with the offer itself.

        Raises:
            LinkLost: The link is down.
        """
        state = self._state
        with state.lock:
            lease = state.leases.grant(self._link.token, self._record, _FOR_EVER, giver=self)
        if not self._posted:
            self._post()
        message = PartReady(
            id=self._link.next_id(),
            offer_id=self._offer_id,
            part=part,
            lease_id=lease.lease_id,
            lease=codec.word_message(lease.word),
            time_left_ms=time_left_ms,
        )
        return self._link.call(message), lease

    def end_part(self, lease: Lease) -> None:
        """The part was read, or will not be: its lease ends."""
        state = self._state
        with state.lock:
            if state.leases.end(lease):
                state.condition.notify_all()

    def succeed(self) -> bool:
        """All parts were read; False if it was withdrawn before.

        Raises:
            LinkLost: It is not certain that the peer has heard so.
        """
        self._end_leases()
        return self._decision.make(ok=True)

    def withdraw(self) -> None:
        """Ends all leases (first), then tells the peer to forget the offer; after ``succeed`` nothing more."""
        self._end_leases()
        if self._posted:
            self._decision.settle()

    def refusal(self, context: Context, answer: Done, lease: Lease) -> LLMException:
        """What a part failed with that nobody here has withdrawn.

        The destination says of a lease that has ended under it that it was withdrawn; why, only we know.
        """
        with self._state.lock:
            held = self._state.leases.holds(lease)
        if held:
            return context.refused(answer.code, answer.text)
        cache_id = self._record.cache_id
        error = CacheNotExistError(
            f"{context.where}: cache {cache_id} was unregistered, or its memory mapped anew, while it was being read"
        )
        error.__cause__ = Refusal(answer.code, answer.text)
        return error

    def _end_leases(self) -> None:
        state = self._state
        with state.lock:
            for lease in state.leases.of_giver(self):
                state.leases.end(lease)
                state.condition.notify_all()

    def _post(self) -> None:
        """Under the lock, so that nothing takes the source back between its publication and the offer."""
        terms = self._terms
        offer = Offer(
            id=self._offer_id,
            kind=terms.kind,
            source_id=self._record.cache_id,
            source_batch=terms.source_batch,
            target=codec.key_ref(*terms.target) if terms.target else None,
            src_layers=codec.layers_pair(terms.layers.src),
            dst_layers=codec.layers_pair(terms.layers.dst),
            tensors_per_layer=terms.layers.tensors_per_layer,
            unit_nbytes=terms.unit_nbytes,
            part_tensors=terms.part_tensors,
            notify=(terms.notice.name, terms.notice.message) if terms.notice else None,
        )
        arrays = (terms.src_blocks, terms.dst_blocks, terms.addresses)
        with self._state.lock:
            self._publish()
            self._posted = True
            self._link.post(offer, [codec.raw(a) for a in arrays])
            if self._state.registry.get(self._record.cache_id) is None:
                self._take_back()

    def _publish(self) -> None:
        """The peer may read that cache for our offers, unless it has been told before. The caller holds the lock."""
        record, published = self._record, peer_of(self._link).published
        if published.use(record.cache_id) == record.word.value:
            return
        entry, addresses = self._state.shown_to(self._link, record)
        self._link.post(Publish(entry=entry), [addresses])
        published.put(record.cache_id, record.word.value, codec.published_nbytes(entry, addresses))

    def _take_back(self) -> None:
        """It is being unregistered, and waits for us: nobody else will say that it has gone."""
        self._link.post(Withdraw(cache_ids=(self._record.cache_id,)))
        peer_of(self._link).published.drop(self._record.cache_id)
