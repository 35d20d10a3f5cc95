"""The owner's side of pulls: finds keys, gives and ends leases, serves reads over transports that need us.

Runs on the control thread and on the transports' serving threads: nothing here blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.layout import CacheSlice, check_slice
from llm_datadist._core.leases import Lease
from llm_datadist._core.registry import KeyName, Record
from llm_datadist._core.segments import Extents
from llm_datadist._engine import codec
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import State, peer_of, tell
from llm_datadist._link.link import Link
from llm_datadist._wire.framing import ProtocolError
from llm_datadist._wire.messages import Done, Found, Grant, Lookup, ReadRequest, Release, Resolve
from llm_datadist.status import (
    CacheNotExistError,
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    ParamInvalidError,
)
from llm_datadist.transports.seam import Fault, FaultKind


class Responder:
    """Answers peers that read us. Implements ``transports.seam.ReadSource``."""

    def __init__(self, state: State) -> None:
        self._state = state

    # ---- messages -----------------------------------------------------------------------------------------

    def resolve(self, link: Link, message: Resolve) -> None:
        """Mode A: a lease on what the key names, or the refusal."""
        state = self._state
        name = codec.key_name(message.key)
        now = time.monotonic()
        left = min(max(message.time_left_ms, 0) / 1000, limits.LEASE_S)
        try:
            with state.lock:
                state.check_open()
                state.check_admitting()
                if state.accessible:
                    raise ParamInvalidError("this cluster is in accessible mode; leases are for managed mode")
                record, batch = self._find(name)
                state.leases.expire(now)
                state.leases.check_room(link.token, limits.LEASES)
                key = name if name.kind == "req" else None
                if name.kind == "cache":
                    key = state.registry.request_key_of(record.cache_id, message.key.batch_index)
                if record.is_blocks or not state.pools.has(record.cache_id):
                    key = None  # no pull releases it
                lease = state.leases.grant(link.token, record, now + left, key)
        except LLMException as exc:
            tell(link, Done(id=message.id, code=exc.status_code, text=str(exc)))
            return
        entry, addresses = state.shown_to(link, record)
        grant = Grant(
            id=message.id,
            lease_id=lease.lease_id,
            lease=codec.word_message(lease.word),
            entry=entry,
            batch_index=batch,
            takes_key=lease.key is not None,
        )
        tell(link, grant, addresses)

    def release(self, link: Link, message: Release) -> None:
        """The reader is done, and releases nothing."""
        state = self._state
        with state.lock:
            lease = state.leases.get(message.lease_id, link.token, time.monotonic())
            if lease is None:
                return
            state.leases.end(lease)
            state.condition.notify_all()
        peer_of(link).count_out(message.nbytes)

    def lookup(self, link: Link, message: Lookup) -> None:
        """Mode B: a key that the peer's copy of our table does not have."""
        state = self._state
        name = codec.key_name(message.key)
        try:
            with state.lock:
                state.check_open()
                state.check_admitting()
                if not state.accessible:
                    raise ParamInvalidError("this cluster is in managed mode; it has no table for peers")
                record, batch = self._find(name)
                check_accessible(record)
                entry, addresses = state.shown_to(link, record, state.registry.binding_of(name))
        except LLMException as exc:
            tell(link, Done(id=message.id, code=exc.status_code, text=str(exc)))
            return
        tell(link, Found(id=message.id, entry=entry, batch_index=batch), addresses)

    def _find(self, name: KeyName) -> tuple[Record, int]:
        found = self._state.registry.find(name)
        if found is None:
            raise CacheNotExistError(f"no cache of that cluster has the key {describe_name(name)}")
        return found

    # ---- reads that we serve --------------------------------------------------------------------------------

    def open(self, link_token: bytes, selector: bytes) -> Serving | Fault:
        """Finds, checks and pins what a reader asked for."""
        try:
            request, part = codec.read_selector(selector)
            return self._open(link_token, request, part)
        except (ProtocolError, LLMException) as exc:
            return _refusal(exc)

    def send_now(self, link_token: bytes, selector: bytes, send: Callable[[Extents], None]) -> Fault | None:
        """The same for what is sent within the call: nothing to pin."""
        try:
            request, part = codec.read_selector(selector)
            with self._state.lock:
                record = self._checked(link_token, request, part)
                send(part.extents(record.addresses))
        except (ProtocolError, LLMException) as exc:
            return _refusal(exc)
        return None

    def units(self, link_token: bytes, selector: bytes) -> ServedUnits | None:
        """Those of the same cache, for a reader that pulls block by block."""
        try:
            request, part = codec.read_selector(selector)
            if request.lease_id or not codec.is_unit(request, part):
                return None
            with self._state.lock:
                record = self._checked(link_token, request, part)
        except (ProtocolError, LLMException):
            return None
        return ServedUnits(
            self._state, link_token, record, request.generation, part.extents(record.addresses)
        )

    def _checked(self, link_token: bytes, request: ReadRequest, part: CacheSlice) -> Record:
        """Of what a part is. The caller holds the lock."""
        record = self._allowed(link_token, request)[2]
        check_slice(part, record.layout, unit_nbytes=record.layout.stride_nbytes)
        return record

    def _open(self, link_token: bytes, request: ReadRequest, part: CacheSlice) -> Serving:
        state = self._state
        with state.lock:
            link, leases, record = self._allowed(link_token, request)
            flight = Flight(link, (record.cache_id,), serving=True)
            state.flights.begin(flight)
        try:
            check_slice(part, record.layout, unit_nbytes=record.layout.stride_nbytes)
            extents = part.extents(record.addresses)
        except BaseException:
            state.flights.end(flight)
            raise
        return Serving(state, extents, flight, leases, request)

    def _allowed(self, link_token: bytes, request: ReadRequest) -> tuple[Link, tuple[Lease, ...], Record]:
        """Whose read it is, by which leases, and of what. The caller holds the lock."""
        self._state.check_open()
        link = self._state.by_token.get(link_token)
        if link is None:
            raise LinkFailedError("the link of this read is down here")
        if not request.lease_id:
            if self._state.accessible:
                return link, (), self._record(request)
            raise ParamInvalidError("a read without a lease; managed mode needs one")
        named = ((request.lease_id, request.lease_value), *request.more_leases)
        leases = tuple(self._lease(link, request.cache_id, *lease) for lease in named)
        return link, leases, leases[0].record

    def _lease(self, link: Link, cache_id: int, lease_id: int, value: int) -> Lease:
        lease = self._state.leases.get(lease_id, link.token, time.monotonic())
        if lease is None or lease.word.value != value or lease.record.cache_id != cache_id:
            raise CacheNotExistError(f"lease {lease_id} on cache {cache_id} has ended")
        return lease

    def _record(self, request: ReadRequest) -> Record:
        record = self._state.registry.get(request.cache_id)
        if record is None or not self._state.registry.is_current(record, request.generation):
            raise CacheNotExistError(
                f"cache {request.cache_id} of that generation is not registered any more"
            )
        check_accessible(record)
        return record


class ServedUnits:
    """Blocks of one cache that a reader was allowed. Implements ``transports.seam.ServedUnits``."""

    def __init__(
        self, state: State, link_token: bytes, record: Record, generation: int, one: Extents
    ) -> None:
        self._state = state
        self._link_token = link_token
        self._record = record
        self._generation = generation
        self._bases, self._lengths = one.bases, one.lengths
        self._dim0, self._stride_nbytes = record.layout.dim0, one.row_nbytes

    def send_now(self, unit: int, send: Callable[[Extents], None]) -> bool:
        """Shows a block to ``send``, if the reader is still allowed it."""
        if unit >= self._dim0:
            return False
        stride, lengths = self._stride_nbytes, self._lengths
        offsets = np.array((unit * stride,), dtype=np.uint64)
        extents = Extents(self._bases, offsets, lengths, lengths, stride)
        with self._state.lock:
            if not self._stands():
                return False
            send(extents)
        return True

    def _stands(self) -> bool:
        state, record = self._state, self._record
        if state.closed is not None or self._link_token not in state.by_token:
            return False
        registry = state.registry
        return registry.get(record.cache_id) is record and registry.is_current(record, self._generation)


class Serving:
    """One read being served. Implements ``transports.seam.Serving``."""

    def __init__(
        self, state: State, extents: Extents, flight: Flight, leases: tuple[Lease, ...], request: ReadRequest
    ) -> None:
        self.extents = extents
        self._state = state
        self._flight = flight
        self._leases = leases
        self._request = request

    def check(self) -> Fault | None:
        """Whether the reader may still have these bytes."""
        error = self._flight.error
        if error is not None:
            return Fault(FaultKind.REFUSED, str(error), error.status_code)
        with self._state.lock:
            why = self._lease_ended() if self._leases else self._key_moved()
        return Fault(FaultKind.REFUSED, why, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST) if why else None

    def place_of(self, at: int) -> str:
        """See the seam. The address as well, if the reader has got addresses of that cache."""
        request, extents = self._request, self.extents
        row, base = at // extents.row_nbytes, int(extents.bases[at // extents.row_nbytes])
        address = int(extents.take_pairs(at, 1, 1)[0][0, 0])
        text = f"byte {address - base} of tensor {request.first_tensor + row} of cache {request.cache_id}"
        return f"{text}, at {address:#x}," if self._state.shows_addresses(self._flight.link) else text

    def _lease_ended(self) -> str:
        now, leases = time.monotonic(), self._state.leases
        held = all(leases.get(lease.lease_id, lease.holder, now) for lease in self._leases)
        return "" if held else "the lease has ended"

    def _key_moved(self) -> str:
        """Without a lease the key may be taken over or removed meanwhile; an unregister waits for us instead."""
        record = self._state.registry.get(self._request.cache_id)
        if record is None or self._state.registry.is_current(record, self._request.generation):
            return ""
        return "its owner withdrew it while it was being read"

    def close(self) -> None:
        """It is over."""
        self._state.flights.end(self._flight)


def _refusal(exc: ProtocolError | LLMException) -> Fault:
    code = exc.status_code if isinstance(exc, LLMException) else LLMStatusCode.LLM_PARAM_INVALID
    return Fault(FaultKind.REFUSED, str(exc), code)


def check_accessible(record: Record) -> None:
    """Mode B may only touch what was opened to peers.

    Raises:
        ParamInvalidError: It was not.
    """
    if not record.remote_accessible:
        raise ParamInvalidError(
            f"cache {record.cache_id} was registered with remote_accessible=False (the default for placement HOST and "
            "after link()); register it with remote_accessible=True, before link()"
        )


def describe_name(name: KeyName) -> str:
    """A key name in a text."""
    match name.kind:
        case "cache":
            return f"cache_id={name.id}"
        case "blocks":
            return f"BlocksCacheKey(model_id={name.model_id})"
        case _:
            return f"{name.kind}_id={name.id}, model_id={name.model_id}"
