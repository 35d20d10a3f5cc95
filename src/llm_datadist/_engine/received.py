"""An offer that a peer has made us, and what is known of it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import Record
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.segments import U64
from llm_datadist._engine.flights import Flight
from llm_datadist._link.link import Link
from llm_datadist._wire.messages import Offer, PartReady
from llm_datadist.status import LLMException


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
    def is_push(self) -> bool:
        """One call of its initiator, whose time runs from the sending; layers have theirs one by one."""
        return self.offer.kind != "layers"
