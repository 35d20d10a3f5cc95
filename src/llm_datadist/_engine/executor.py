"""Runs one plan under a deadline, with the generation check around it.

One-sided: the word is read before the first data call (a cache already withdrawn changes nothing here) and
again after the last data call of all movers has returned. Otherwise the owner does both. What went wrong
leaves here as Stale or MoveError; the callers turn that into status codes.
"""

from __future__ import annotations

import time

import msgspec

from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._engine import codec
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import Peer
from llm_datadist._engine.ways import Way, way_for
from llm_datadist._shortages import reason_of
from llm_datadist.status import LLMStatusCode, ParamInvalidError
from llm_datadist.transports.seam import Fault, FaultKind, OneSidedChannel


class Stale(Exception):  # noqa: N818 - a fact, not an error of this code
    """What was to be read is not there any more. ``begun``: destination bytes may have changed."""

    def __init__(self, text: str, *, begun: bool = False) -> None:
        super().__init__(text)
        self.begun = begun


class MoveError(Exception):
    """The bytes did not all arrive. Caused by what the system reported, if it was that."""

    def __init__(self, fault: Fault, nbytes: int) -> None:
        super().__init__(fault, nbytes)
        self.fault = fault
        self.nbytes = nbytes
        self.__cause__ = fault.cause

    def __str__(self) -> str:
        return self.fault.text


class Wanted(msgspec.Struct, frozen=True):
    """What is read of a peer.

    Attributes:
        cache: The peer's cache.
        part: What of it.
        word: What says that it is still there, for a reader by address: of the lease, the key, or the cache.
        generation: The word that the owner compares, where it serves the read.
        lease: Its id and word, if there is one.
        more: Further leases that must hold, of the parts of a push that are read together.
    """

    cache: RemoteCache
    part: CacheSlice
    word: GenerationWord
    generation: GenerationWord
    lease: tuple[int, GenerationWord] | None
    more: tuple[tuple[int, GenerationWord], ...] = ()


def move(peer: Peer, wanted: Wanted, destination: Extents, deadline: float, flight: Flight) -> None:
    """Moves all bytes of ``wanted``, or raises.

    Args:
        peer: Whom to read.
        wanted: What to read.
        destination: Where to put it.
        deadline: Instant of ``time.monotonic()``.
        flight: A cut of it ends the call.

    Raises:
        Stale: A word has changed, in time.
        MoveError: Anything else that stopped it.
        ParamInvalidError: None of the link's transports reaches that memory.
        LLMException: What the flight was cut off with.
    """
    if not destination.nbytes:
        return
    flight.reads = wanted.cache.cache_id  # before a look at the word: its owner clears it, then asks
    try:
        _move(peer, wanted, destination, deadline, flight)
    except Stale as exc:
        if time.monotonic() < deadline:
            raise
        # A lease ends with the time of its pull: what ends for want of time is not called withdrawn.
        raise MoveError(Fault(FaultKind.TIMEOUT, str(exc)), 0) from exc
    except MemoryError as exc:
        fault = Fault(FaultKind.REFUSED, reason_of(exc), LLMStatusCode.LLM_OUT_OF_MEMORY, exc)
        raise MoveError(fault, 0) from exc
    finally:
        flight.reads = 0


def _move(peer: Peer, wanted: Wanted, destination: Extents, deadline: float, flight: Flight) -> None:
    way, plan = _choose(peer, wanted, destination, deadline, flight)
    by_address = way.by_address
    if by_address is not None:
        _check_word(peer, by_address, wanted, deadline, begun=False)
    completion = way.channel.read(plan)
    flight.on_cut(completion.cancel)
    try:
        progress = completion.wait(deadline=deadline)
    finally:
        flight.on_cut(None)
    fault = progress.fault
    if fault is None:
        if by_address is not None:
            _check_word(peer, by_address, wanted, deadline, begun=True)
        peer.count_in(progress.nbytes)
        return
    flight.check()
    if fault.kind is FaultKind.REFUSED and fault.code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
        raise Stale(fault.text, begun=progress.nbytes > 0) from MoveError(fault, progress.nbytes)
    if fault.kind is FaultKind.SOURCE and by_address is not None:
        _check_word(peer, by_address, wanted, deadline, begun=True)
    raise MoveError(fault, progress.nbytes)


def _choose(
    peer: Peer, wanted: Wanted, destination: Extents, deadline: float, flight: Flight
) -> tuple[Way, Segments]:
    if peer.only_way is not None:
        return peer.only_way, Segments(wanted.part.extents(wanted.cache.addresses), destination)
    way = peer.ways[0]
    if peer.by_address:
        source = wanted.part.extents(wanted.cache.addresses)
        found = way_for(peer.ways, source, wanted.cache.token, destination)
        came = found is not None or not way.refusal
        if not came:
            came = way.settle(deadline)
            found = way_for(peer.ways, source, wanted.cache.token, destination)
        if found is None:
            flight.check()
            # Before the word: an owner that has refused has closed the connection as well.
            refusal = way.refusal
            if refusal:
                kind = FaultKind.CHANNEL if came else FaultKind.TIMEOUT
                raise MoveError(Fault(kind, refusal, cause=way.refusal_cause), 0)
            if way.by_address is not None:  # words are within reach of what reaches anything at all
                _check_word(peer, way.by_address, wanted, deadline, begun=False)
            raise ParamInvalidError(
                f"cache {wanted.cache.cache_id} of the peer is not in memory that {peer.transport} reaches; have it "
                "allocated there (allocate_cache, allocate_blocks_cache), or leave transfer_backend at 'auto'"
            )
        way = found
        if way.caps.one_sided:
            return way, Segments(source, destination)
    selector = codec.selector(
        wanted.part, wanted.cache.cache_id, wanted.generation, wanted.lease, wanted.more
    )
    return way, Segments(selector, destination)


def _check_word(
    peer: Peer, channel: OneSidedChannel, wanted: Wanted, deadline: float, *, begun: bool
) -> None:
    _check_one(peer, channel, wanted.word, deadline, begun=begun)
    for _, word in wanted.more:
        _check_one(peer, channel, word, deadline, begun=begun)


def _check_one(
    peer: Peer, channel: OneSidedChannel, word: GenerationWord, deadline: float, *, begun: bool
) -> None:
    address, value = word
    found: int | Fault | None = peer.words.peek(address) if peer.words is not None else None
    if found == value:
        return
    if found is None:
        found = channel.read_word(address, deadline=deadline)
    if isinstance(found, Fault):
        raise MoveError(found, 0)
    if found != value:
        when = "while it was being read" if begun else "before it was read"
        raise Stale(f"its owner withdrew it {when}", begun=begun)
