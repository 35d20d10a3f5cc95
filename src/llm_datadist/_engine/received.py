"""An offer that a peer has made us, and what is known of it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from llm_datadist._core import limits
from llm_datadist._core.layer_plans import LayerBlocks
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import Record
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.segments import U64
from llm_datadist._engine import codec
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.responder import describe_name
from llm_datadist._link.link import Link
from llm_datadist._wire.messages import Offer, PartReady
from llm_datadist.status import LLMException, OutOfMemoryError


class GaveWayError(OutOfMemoryError):
    """What was read was cut off for the sake of other links."""

    def __init__(self) -> None:
        super().__init__(
            f"all threads that read pushes are taken, and it was read for {limits.PUSH_TURN_S:g} s while other links "
            "had none; push it again, or less at once"
        )


@dataclass(frozen=True, slots=True, eq=False)
class OfferPlan:
    """What an offer moves: the source part, and the part of ``bases`` that it goes to.

    ``records``: the caches written, by key; None: raw addresses, looked up again for every part.
    """

    source: CacheSlice
    target: CacheSlice
    bases: U64
    records: tuple[Record, ...] | None


@dataclass(slots=True, eq=False)
class ReceivedOffer:
    """An offer of a peer, and its parts that wait."""

    link: Link
    offer: Offer
    source: RemoteCache
    src_blocks: U64
    dst_blocks: U64
    addresses: U64
    nbytes: int = 0
    plan: OfferPlan | LLMException | None = None
    waiting: deque[tuple[PartReady, float]] = field(default_factory=deque)
    running: bool = False
    ended: bool = False
    together_nbytes: int = 0
    flight: Flight | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def blocks(self) -> LayerBlocks:
        """Which blocks of the source go to which of the destination."""
        return LayerBlocks(self.src_blocks, self.dst_blocks, self.offer.unit_nbytes)

    @property
    def what(self) -> str:
        """It in an error text."""
        target = self.offer.target
        if target is None:
            first = int(self.addresses[0]) if len(self.addresses) else 0
            return f"push ({self.offer.kind}) to raw addresses from {first:#x}"
        return f"push ({self.offer.kind}) to {describe_name(codec.key_name(target))}"

    def give_way(self) -> None:
        """Cuts off what is read of it now: others wait for the thread."""
        with self.lock:
            flight = self.flight
        if flight is not None:
            flight.cut(GaveWayError())

    @property
    def is_push(self) -> bool:
        """One call of its initiator, whose time runs from the sending; layers have theirs one by one."""
        return self.offer.kind != "layers"
