"""Pulls: find the source (by asking its owner, mode A, or in our copy of its table, mode B), plan, move.

The caller's thread does it all; see ARCHITECTURE.md for the way of one pull. Invariant: when ``pull`` has
returned or raised, nothing of it writes any more.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import msgspec

from llm_datadist._core import planning
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import GenerationWord, KeyName, Record, request_name
from llm_datadist._core.remote_table import Found as Entry
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.requests import PullBlocks, PullCache
from llm_datadist._engine import codec
from llm_datadist._engine.destinations import check_destination
from llm_datadist._engine.executor import MoveError, Stale, Wanted, move
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.obligations import Ending, LeaseHold
from llm_datadist._engine.state import State, peer_of
from llm_datadist._link.link import Link, LinkLost, NoAnswer, Pending
from llm_datadist._waiting import check_outside
from llm_datadist._wire.framing import Frame, ProtocolError
from llm_datadist._wire.messages import CacheEntry, Done, Finish, Found, Grant, Lookup, Resolve
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import CacheNotExistError, LLMException, LLMStatusCode, ParamInvalidError

_PROBE_S = 0.4  # for the answer of a peer that is alive and has withdrawn something


class Source(msgspec.Struct, frozen=True):
    """Where a pull reads.

    Attributes:
        cache: The peer's cache.
        batch: The slot that the key names.
        word: What says that it is still there: of the lease, the key, or the cache.
        lease: Its id and word, if there is one.
        takes_key: Reading all of it releases a request key.
    """

    cache: RemoteCache
    batch: int
    word: GenerationWord
    lease: tuple[int, GenerationWord] | None = None
    takes_key: bool = False


class Initiator:
    """Pulls of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    def pull(self, request: PullCache | PullBlocks, started: float) -> None:
        """Pulls, or raises; returns within sync_kv_timeout of ``started``.

        Raises:
            CacheNotExistError: The local cache, or what the key names at the peer.
            ParamInvalidError: A rule about indices, sizes or layers.
            NotLinkedError: No link.
            LinkFailedError: The link went down meanwhile.
            TransferTimeoutError: LLM_WAIT_PROCESS_TIMEOUT.
            LLMException: LLM_FAILED, the peer's memory cannot be read.
            OutOfMemoryError: The data is complete, but the peer has no room for the notification; no key is released.
            LinkBusyError: The engine waits for this thread, which a signal handler has interrupted.
        """
        check_outside("a pull")
        record = self.check(request)
        flight = Flight(None, (record.cache_id,))

        def body() -> None:
            self.begin(request, record, flight)
            self.run(request, record, flight, started)

        self._state.flights.fly(flight, body)

    def run(self, request: PullCache | PullBlocks, record: Record, flight: Flight, started: float) -> None:
        """Moves the bytes, then ends the call with the peer, within the flight; its time began at ``started``."""
        pull = _Pull(self._state, request, record, flight, started, started + self._state.timeout_s)
        flight.run_here()
        try:
            flight.check()
            pull.run()
        except (Stale, MoveError, LinkLost, NoAnswer, ProtocolError) as exc:
            flight.check()
            if isinstance(exc, Stale):
                pull.check_owner()
            error = pull.context.failure(exc)
            raise error from error.__cause__

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

    def check_owner(self) -> None:
        """A word that has changed may be the end of its owner, seen before the end of the connection.

        Raises:
            LinkFailedError: It is.
        """
        pending = self.link.expect()
        try:
            self.link.ask(pending, Lookup(id=pending.id, key=codec.key_ref(request_name(self.request.key))))
            answer = pending.wait(time.monotonic() + _PROBE_S).message
        except LinkLost as exc:
            raise self.context.failure(exc) from exc
        except NoAnswer:
            return
        finally:
            pending.close()
        if isinstance(answer, Done) and answer.code == LLMStatusCode.LLM_ENGINE_FINALIZED:
            raise self.context.refused(answer.code, answer.text)

    def _run_managed(self) -> None:
        hold, source = self._leased()
        while True:
            try:
                part = self._move(source)
                break
            except Stale as exc:
                hold, source = self._leased_since(source, exc)
        hold.read_nbytes = part.nbytes
        if source.takes_key or self.request.notice is not None:
            self._finish(source, part)
            hold.end_elsewhere()

    def _leased(self) -> tuple[LeaseHold, Source]:
        hold = LeaseHold(self.link)
        self.flight.owes(hold.settle)
        return hold, self._resolve(hold.pending)

    def _leased_since(self, source: Source, stale: Stale) -> tuple[LeaseHold, Source]:
        """The same cache, if its owner has it still: its memory was mapped anew, which ends leases.

        Raises:
            Stale: It was cut off, or is gone.
        """
        self.flight.check()
        try:
            hold, fresh = self._leased()
        except LLMException:
            raise stale from None
        if fresh.cache.cache_id != source.cache.cache_id or fresh.cache.word == source.cache.word:
            raise stale
        return hold, fresh

    def _run_accessible(self) -> None:
        self._move_accessible()
        if self.request.notice is not None:
            self._finish()

    def _finish(self, source: Source | None = None, part: CacheSlice | None = None) -> None:
        """The data is complete; what else the call does at the peer happens, or the call fails."""
        notice = self.request.notice
        first, count, nbytes = (part.first_tensor, part.tensor_count, part.nbytes) if part else (0, 0, 0)
        what = f"{'release of its key' if notice is None else 'notification'} after the {self.context.what}"
        Ending(self.flight).run(
            lambda number: Finish(
                id=number,
                lease_id=source.lease[0] if source and source.lease else 0,
                first_tensor=first,
                tensor_stop=first + count,
                nbytes=nbytes,
                notify=(notice.name, notice.message) if notice else None,
            ),
            replace(self.context, what=f"{what}, whose data is complete"),
            self.deadline,
        )

    def _move_accessible(self) -> None:
        name = request_name(self.request.key)
        with self.state.lock:
            found = peer_of(self.link).table.find(name)
        source = self._lookup(name) if found is None else self._source_of(found)
        begun: Stale | None = None
        while True:
            try:
                self._move(source)
                return
            except (Stale, ParamInvalidError, CacheNotExistError) as exc:
                # Our copy of the table may be behind, or the owner has replaced something: it knows what there is.
                begun = exc if isinstance(exc, Stale) and exc.begun else begun
                source = self._found_since(name, source, begun or exc, begun=begun is not None)

    def _source_of(self, found: Entry) -> Source:
        return Source(found.cache, self._batch(found.batch), found.word)

    def _found_since(self, name: KeyName, source: Source, error: Exception, *, begun: bool) -> Source:
        """What a key finds by now. Bytes that have moved are a race lost, if the cache that they came from has gone.

        Raises:
            Exception: ``error``: it has, or the key still finds what could not be read.
        """
        self.flight.check()
        try:
            fresh = self._lookup(name)
            if begun and fresh.cache.cache_id != source.cache.cache_id:
                self._lookup(KeyName("cache", source.cache.cache_id, 0))
        except LLMException:
            if begun:
                raise error from error.__cause__
            raise
        if fresh.word == source.word:
            raise error from error.__cause__
        return fresh

    # ---- finding the source ---------------------------------------------------------------------------

    def _resolve(self, pending: Pending) -> Source:
        name = request_name(self.request.key)
        key = codec.key_ref(name, self._batch(0))
        frame = self._ask(pending, Resolve(id=pending.id, key=key, time_left_ms=self._time_left_ms()))
        grant = frame.message
        if not isinstance(grant, Grant):
            raise self._odd(grant)
        cache = self._cache_in(grant.entry, frame)
        word = codec.word_of(grant.lease)
        batch = self._batch(grant.batch_index)
        return Source(cache, batch, word, (grant.lease_id, word), grant.takes_key)

    def _lookup(self, name: KeyName) -> Source:
        pending = self.link.expect()
        try:
            frame = self._ask(pending, Lookup(id=pending.id, key=codec.key_ref(name)))
        finally:
            pending.close()
        found = frame.message
        if not isinstance(found, Found):
            raise self._odd(found)
        cache = self._cache_in(found.entry, frame)
        return Source(cache, self._batch(found.batch_index), cache.word_for(name))

    def _ask(self, pending: Pending, question: Resolve | Lookup) -> Frame:
        with self.flight.cancelling(pending.fail):
            self.link.ask(pending, question)
            frame = pending.wait(self.deadline)
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
            raise self.context.invalid(exc) from exc
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
