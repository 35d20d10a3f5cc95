"""Pulls: find the source (by asking its owner, mode A, or in our copy of its table, mode B), plan, move.

The caller's thread does it all; see ARCHITECTURE.md for the way of one pull. Invariant: when ``pull`` has
returned or raised, nothing of it writes any more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from llm_datadist._core import planning
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import GenerationWord, KeyName, Record, request_name
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.requests import PullBlocks, PullCache
from llm_datadist._engine import codec
from llm_datadist._engine.destinations import check_destination
from llm_datadist._engine.executor import MoveError, Stale, Wanted, move
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.notifications import Notifications
from llm_datadist._engine.state import State, peer_of, tell
from llm_datadist._link.link import Link, LinkLost, Pending
from llm_datadist._wire.framing import Frame, ProtocolError
from llm_datadist._wire.messages import CacheEntry, Done, Found, Grant, Lookup, Release, Resolve
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import CacheNotExistError, LLMException, LLMStatusCode, ParamInvalidError

_PROBE_S = 0.1  # for the answer of a peer that is alive and has withdrawn something


class Source(msgspec.Struct, frozen=True):
    """Where a pull reads.

    Attributes:
        cache: The peer's cache.
        batch: The slot that the key names.
        word: What says that it is still there: of the lease, the key, or the cache.
        lease: Its id and word, if there is one.
    """

    cache: RemoteCache
    batch: int
    word: GenerationWord
    lease: tuple[int, GenerationWord] | None = None


class Initiator:
    """Pulls of this engine's callers."""

    def __init__(self, state: State, notifications: Notifications) -> None:
        self._state = state
        self._notifications = notifications

    def pull(self, request: PullCache | PullBlocks, started: float) -> None:
        """Pulls, or raises; returns within sync_kv_timeout of ``started``.

        Raises:
            CacheNotExistError: The local cache, or what the key names at the peer.
            ParamInvalidError: A rule about indices, sizes or layers.
            NotLinkedError: No link.
            LinkFailedError: The link went down meanwhile.
            TransferTimeoutError: LLM_WAIT_PROCESS_TIMEOUT.
            LLMException: LLM_FAILED, the peer's memory cannot be read.
            OutOfMemoryError: The data is complete, but the peer has no room for the notification.
        """
        record = self.check(request)
        flight = Flight(None, (record.cache_id,))

        def body() -> None:
            self.begin(request, record, flight)
            self.run(request, record, flight, started)

        self._state.flights.fly(flight, body)

    def run(self, request: PullCache | PullBlocks, record: Record, flight: Flight, started: float) -> None:
        """Moves the bytes, then tells the peer, within the flight; its time began at ``started``."""
        pull = _Pull(self._state, request, record, flight, started, started + self._state.timeout_s)
        flight.run_here()
        try:
            flight.check()
            pull.run()
            if request.notice is not None:
                what = f"notification after the {pull.context.what}, whose data is complete"
                self._notifications.deliver(
                    flight, replace(pull.context, what=what), request.notice, pull.deadline
                )
        except (Stale, MoveError, LinkLost, TimeoutError, ProtocolError) as exc:
            flight.check()
            if isinstance(exc, Stale):
                self._check_link(pull.context)
            raise pull.context.failure(exc) from exc.__cause__

    def _check_link(self, context: Context) -> None:
        """A word that has changed may be the end of the link, seen before the end of its connection.

        Raises:
            LinkFailedError: It is.
        """
        try:
            self._state.links.ping(context.link, time.monotonic() + _PROBE_S)
        except LinkLost as exc:
            raise context.lost(exc) from None
        except TimeoutError:
            return

    def check(self, request: PullCache | PullBlocks) -> Record:
        """The destination; everything that needs no peer is checked.

        Raises:
            CacheNotExistError: The local cache.
            ParamInvalidError: A rule of the caller's side.
        """
        state = self._state
        state.check_open()
        record = state.record_of(request.cache)  # without the lock: ``begin`` looks again, under it
        if isinstance(request, PullCache):
            planning.check_pull_cache(request, record.layout, dst_is_blocks=record.is_blocks)
        else:
            planning.check_pull_blocks(request, record.layout, dst_is_blocks=record.is_blocks)
        if request.key.cluster_id == state.cluster_id:
            raise ParamInvalidError(
                f"{request.key!r} names this cluster ({state.cluster_id}) itself; a pull reads from another one"
            )
        if isinstance(request.key, CacheKey):
            request_name(request.key)
        return record

    def begin(self, request: PullCache | PullBlocks, record: Record, flight: Flight) -> None:
        """Enters the flight.

        Raises:
            LinkBusyError: The engine is draining.
            NotLinkedError: No link.
            CacheNotExistError: The local cache has gone meanwhile.
        """
        state = self._state
        with state.lock:
            state.check_open()
            state.check_admitting()
            flight.over(state.link_to(request.key.cluster_id))
            state.record_of(request.cache)
            state.flights.begin(flight)


class _Pull(msgspec.Struct, frozen=True):
    """One pull under way."""

    state: State
    request: PullCache | PullBlocks
    record: Record
    flight: Flight
    started: float
    deadline: float

    @property
    def context(self) -> Context:
        return Context(
            f"pull of {self.request.key!r} into cache {self.record.cache_id}",
            self.link, self.started, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
        )  # fmt: skip

    @property
    def link(self) -> Link:
        return self.flight.link

    def run(self) -> None:
        if self.state.accessible:
            self._run_accessible()
        else:
            self._run_managed()

    def _run_managed(self) -> None:
        source = self._resolve()
        ok = False
        part: CacheSlice | None = None
        try:
            part = self._move(source)
            ok = True
        finally:
            _release(self.link, source, part, ok=ok)

    def _run_accessible(self) -> None:
        name = request_name(self.request.key)
        with self.state.lock:
            found = peer_of(self.link).table.find(name)
        if found is None:
            self._move(self._lookup(name))
            return
        source = Source(found.cache, self._batch(found.batch), found.word)
        try:
            self._move(source)
        except (Stale, ParamInvalidError, CacheNotExistError) as exc:
            # Our copy of the table may be behind: the owner knows. Bytes that have moved are a race lost.
            begun = isinstance(exc, Stale) and exc.begun
            self.flight.check()
            fresh = None if begun else self._lookup(name)
            if fresh is None or fresh.word == source.word:
                raise
            self._move(fresh)

    # ---- finding the source ---------------------------------------------------------------------------

    def _resolve(self) -> Source:
        name = request_name(self.request.key)
        frame = self._ask(
            lambda i: Resolve(
                id=i, key=codec.key_ref(name, self._batch(0)), time_left_ms=self._time_left_ms()
            ),
            name,
        )
        grant = frame.message
        if not isinstance(grant, Grant):
            raise self._odd(grant)
        cache = self._cache_in(grant.entry, frame)
        word = codec.word_of(grant.lease)
        return Source(cache, self._batch(grant.batch_index), word, (grant.lease_id, word))

    def _lookup(self, name: KeyName) -> Source:
        frame = self._ask(lambda i: Lookup(id=i, key=codec.key_ref(name)), name)
        found = frame.message
        if not isinstance(found, Found):
            raise self._odd(found)
        cache = self._cache_in(found.entry, frame)
        return Source(cache, self._batch(found.batch_index), cache.word_for(name))

    def _ask(self, question: Callable[[int], Resolve | Lookup], name: KeyName) -> Frame:
        pending = self.link.call(question(self.link.next_id()))
        try:
            with self.flight.cancelling(lambda reason: pending.finish(None, reason)):
                frame = pending.wait(self.deadline)
        except BaseException:
            _abandon(self.link, pending)
            raise
        answer = frame.message
        if isinstance(answer, Done):
            raise self.context.refused(answer.code, answer.text)
        return frame

    def _cache_in(self, entry: CacheEntry, frame: Frame) -> RemoteCache:
        return codec.remote_cache(entry, codec.attachment(frame, 0), by_address=peer_of(self.link).by_address)

    def _odd(self, message: object) -> LLMException:
        return self.context.lost(f"unexpected answer {type(message).__name__}")

    def _batch(self, bound: int) -> int:
        key = self.request.key
        return key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else bound

    def _time_left_ms(self) -> int:
        # Rounded up: the lease must not end before our time does.
        return max(1, math.ceil((self.deadline - time.monotonic()) * 1000))

    # ---- planning and moving ------------------------------------------------------------------------------

    def _move(self, source: Source) -> CacheSlice:
        try:
            src, dst = self._plan(source)
            destination = dst.extents(self.record.addresses)
            check_destination(
                self.state, self.link, source.cache.cache_id, src, dst, destination, self.record
            )
        except ParamInvalidError as exc:
            raise self.context.invalid(exc) from None
        wanted = Wanted(source.cache, src, source.word, source.word, source.lease)
        move(peer_of(self.link), wanted, destination, self.deadline, self.flight)
        return src

    def _plan(self, source: Source) -> tuple[CacheSlice, CacheSlice]:
        request, cache, dst = self.request, source.cache, self.record.layout
        if isinstance(request, PullBlocks) and isinstance(request.key, BlocksCacheKey):
            return planning.plan_blocks(
                cache.layout, request.src_blocks, dst, request.dst_blocks, request.layers
            )
        self._check_slot(cache, source.batch)
        if isinstance(request, PullBlocks):
            return planning.plan_slot_to_blocks(
                cache.layout, source.batch, dst, request.dst_blocks, request.layers
            )
        return planning.plan_slot(
            cache.layout, source.batch, dst, request.batch_index, request.size, request.layers
        )

    def _check_slot(self, cache: RemoteCache, batch: int) -> None:
        if cache.is_blocks:
            raise ParamInvalidError(
                f"cache {cache.cache_id} of the peer is a blocks cache; use pull_blocks by BlocksCacheKey"
            )
        if batch >= cache.layout.dim0:
            raise CacheNotExistError(
                f"{self.context.where}: batch index {batch}, but cache {cache.cache_id} has {cache.layout.dim0} slots"
            )


def _release(link: Link, source: Source, part: CacheSlice | None, *, ok: bool) -> None:
    if source.lease is None:
        return
    first, count, nbytes = (part.first_tensor, part.tensor_count, part.nbytes) if part else (0, 0, 0)
    message = Release(
        lease_id=source.lease[0], ok=ok, first_tensor=first, tensor_stop=first + count, nbytes=nbytes
    )
    tell(link, message)


def _abandon(link: Link, pending: Pending) -> None:
    """Nobody waits for this answer any more; a grant that came at the last moment is given back."""
    pending.discard()
    if pending.done:
        try:
            late = pending.wait(0.0).message
        except LinkLost:
            return
        if isinstance(late, Grant):
            give_back(link, late)


def give_back(link: Link, grant: Grant) -> None:
    """Releases a grant that nobody uses."""
    tell(link, Release(lease_id=grant.lease_id, ok=False))
