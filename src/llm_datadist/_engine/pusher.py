"""Pushes: offer the bytes, wait until the destination has read them.

The mirror of a pull, driven by the destination (see ``receiver``). Invariant: when ``push`` raises a
time-out, a destination that had not begun never will.
"""

from __future__ import annotations

import contextlib
import time

from llm_datadist._core import planning
from llm_datadist._core.registry import Record, request_name
from llm_datadist._core.requests import PushBlocks, PushCache
from llm_datadist._engine.errands import Call, interrupted
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.offering import Offering, OfferTerms
from llm_datadist._engine.state import State, peer_of
from llm_datadist._link.link import LinkLost, Pending
from llm_datadist._wire.messages import Done
from llm_datadist.status import LLMStatusCode, ParamInvalidError

_LONGEST_STOP_S = 0.5  # for a destination to say so after a cut, which someone waits for


class Pusher:
    """Pushes of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    def push(self, request: PushCache | PushBlocks, call: Call) -> None:
        """Pushes, or raises; returns within sync_kv_timeout.

        Raises:
            CacheNotExistError: The local cache, or what the key names at the peer.
            ParamInvalidError: Managed mode, or a rule about indices, sizes or layers.
            NotLinkedError: No link.
            LinkFailedError: The link went down meanwhile.
            TransferTimeoutError: LLM_TIMEOUT.
            OutOfMemoryError: The data is complete, but the peer has no room for the notification.
        """
        started = time.monotonic()
        record = self.check(request)
        flight = Flight(None, (record.cache_id,))
        call.on_cut(lambda: flight.cut(interrupted()))

        def body() -> None:
            self.begin(request, record, flight)
            self.run(request, record, flight, started)

        self._state.flights.fly(flight, body)

    def run(self, request: PushCache | PushBlocks, record: Record, flight: Flight, started: float) -> None:
        """Offers the bytes, waits for the destination; its time began at ``started``."""
        context = Context(
            f"push of cache {record.cache_id} to {request.key!r}",
            flight.link,
            started,
            LLMStatusCode.LLM_TIMEOUT,
        )
        offering = Offering(self._state, flight.link, record, self._terms(request, record))
        flight.owes(offering.withdraw)
        flight.run_here()
        try:
            flight.check()
            self._run(offering, flight, context, started + self._state.timeout_s)
        except (LinkLost, TimeoutError) as exc:
            flight.check()
            error = context.failure(exc)
            raise error from error.__cause__

    def check(self, request: PushCache | PushBlocks) -> Record:
        """The source; everything that needs no peer is checked.

        Raises:
            CacheNotExistError: The local cache.
            ParamInvalidError: Managed mode, or a rule of the caller's side.
        """
        state = self._state
        with state.lock:
            state.check_open()
            record = state.record_of(request.cache)
        if not state.accessible:
            raise ParamInvalidError(
                "push_cache and push_blocks need LLMConfig.enable_remote_cache_accessible = True on both sides; "
                "set it, or pull from the other side"
            )
        if isinstance(request, PushCache):
            planning.check_push_cache(request, record.layout, src_is_blocks=record.is_blocks)
        else:
            planning.check_push_blocks(request, record.layout, src_is_blocks=record.is_blocks)
        return record

    def begin(self, request: PushCache | PushBlocks, record: Record, flight: Flight) -> None:
        """Enters the flight.

        Raises:
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

    def _terms(self, request: PushCache | PushBlocks, record: Record) -> OfferTerms:
        name = request_name(request.key)
        tensors = record.layout.num_tensors
        if isinstance(request, PushBlocks):
            return OfferTerms(
                "blocks", tensors, request.layers, (name, 0),
                src_blocks=request.src_blocks, dst_blocks=request.dst_blocks, notice=request.notice,
            )  # fmt: skip
        return OfferTerms(
            "cache",
            tensors,
            request.layers,
            (name, request.key.batch_index),
            source_batch=request.src_batch_index,
            notice=request.notice,
        )

    def _run(self, offering: Offering, flight: Flight, context: Context, deadline: float) -> None:
        pending, lease = offering.send_part(0, max(1, int((deadline - time.monotonic()) * 1000)))
        with flight.cancelling(lambda reason: self._stop(offering, pending, reason)):
            try:
                answer = pending.wait(deadline).message
            except TimeoutError:
                offering.withdraw()  # from now on it has failed, whatever the destination still says
                self._await_stop(pending)
                raise
        if not isinstance(answer, Done):
            raise context.lost(f"unexpected answer {type(answer).__name__}")
        if answer.code != LLMStatusCode.LLM_SUCCESS:
            flight.check()  # what it was cut off with, not that the destination has stopped
            raise offering.refusal(context, answer, lease)
        if not offering.succeed():
            flight.check()
        peer_of(flight.link).count_out(answer.nbytes)

    def _stop(self, offering: Offering, pending: Pending, reason: str) -> None:
        """A cut: withdraws, and gives the destination a moment to say that it has stopped.

        What it has said before stands: without the link it cannot be told otherwise.
        """
        if pending.answered:
            return
        offering.withdraw()
        self._state.links.call_at(
            time.monotonic() + min(self._state.grace_s, _LONGEST_STOP_S), lambda: pending.fail(reason)
        )

    def _await_stop(self, pending: Pending) -> None:
        """Gives a withdrawn destination time to say that it has stopped, so that nothing is written after the report.

        One that does not is stopped or cut off itself, and will find the lease word cleared.
        """
        with contextlib.suppress(LinkLost, TimeoutError):
            pending.wait(time.monotonic() + self._state.grace_s)
        pending.close()
