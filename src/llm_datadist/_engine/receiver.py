"""The destination's side of pushes: checks an offer against its own registry, reads the bytes, answers.

Bytes are always written by the process that owns them: a push is a read by its destination. Offers are
noted on the control thread; planning and moving run on workers, the parts of one offer in order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque

from llm_datadist._core import layer_plans, limits, planning
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import KeyName, Record
from llm_datadist._core.requests import Layers
from llm_datadist._core.segments import U64
from llm_datadist._engine import codec
from llm_datadist._engine.destinations import check_destination, check_writable
from llm_datadist._engine.endings import Endings
from llm_datadist._engine.executor import MoveError, Stale, Wanted, move
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.received import GaveWayError, OfferPlan, ReceivedOffer
from llm_datadist._engine.responder import check_accessible, describe_name
from llm_datadist._engine.state import State, describe, peer_of, tell
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._logs import get_logger
from llm_datadist._wire.framing import Frame, ProtocolError
from llm_datadist._wire.messages import Done, EndOffer, Offer, PartReady, Publish
from llm_datadist.status import (
    CacheNotExistError,
    LLMException,
    LLMStatusCode,
    OutOfMemoryError,
    ParamInvalidError,
    TransferTimeoutError,
    error_of,
)

_LOG = get_logger("llm_datadist.engine")
# A layer that is there is not held up for long by those read with it: at first so much is read at once, later
# what the reads of that offer have shown to take so long. Fewer reads are fewer waits for the GIL.
_TOGETHER_NBYTES = 8 << 20
_MOST_TOGETHER_NBYTES = 32 << 20
_TOGETHER_S = 0.05
_WITHDRAWN = "withdrawn by its initiator"


class Receiver:
    """Pushes of peers into our caches."""

    def __init__(self, state: State, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    # ---- messages (control thread) ---------------------------------------------------------------------

    def published(self, link: Link, frame: Frame, message: Publish) -> None:
        """Offers of that peer may read this cache from now on."""
        entry, addresses = message.entry, codec.attachment(frame, 0)
        if entry.keys:
            raise ProtocolError(f"cache {entry.cache_id} was published with keys")
        cache = codec.remote_cache(entry, addresses, by_address=peer_of(link).by_address)
        with self._state.lock:
            self._state.note_published(peer_of(link), cache, codec.published_nbytes(entry, addresses))

    def offer(self, link: Link, frame: Frame, message: Offer) -> None:
        """Notes an offer; its parts come next."""
        offers = peer_of(link).offers
        with self._state.lock:
            source = peer_of(link).sources.use(message.source_id)
        if source is None:
            raise ProtocolError(f"offer of cache {message.source_id}, which is not published on this link")
        if len(offers) >= limits.OFFERS:
            return  # its parts hear of it
        if message.id in offers:
            raise ProtocolError(f"offer {message.id} is open already")
        nbytes = codec.offer_nbytes(frame, message, source)
        held = self._state.offers.take(link.token, nbytes)
        if not held:
            (frame, message, source), nbytes = codec.emptied(message, source), 0
        src_blocks, dst_blocks, addresses = (codec.u64(codec.attachment(frame, at)) for at in range(3))
        codec.check_offer(message)
        offer = ReceivedOffer(link, message, source, src_blocks, dst_blocks, addresses, nbytes)
        offers[message.id] = offer
        try:
            self._state.check_admitting()
        except LLMException as exc:
            offer.plan = exc.with_traceback(None)  # which would hold the frame, and the offer itself
        if not held:
            offer.plan = OutOfMemoryError(
                f"the pushes that are open there hold {self._state.offers.taken >> 20} MiB; try again later"
            )

    def part_ready(self, link: Link, message: PartReady) -> None:
        """A part may be read: queued behind the earlier parts of its offer."""
        offer = peer_of(link).offers.get(message.offer_id)
        if not isinstance(offer, ReceivedOffer):
            _reply(link, message, *_unknown(message, len(peer_of(link).offers)))
            return
        if peer_of(link).count_part(1) > limits.PARTS:
            peer_of(link).count_part(-1)
            text = f"{limits.PARTS} parts of this link wait there"
            _reply(link, message, LLMStatusCode.LLM_OUT_OF_MEMORY, text)
            return
        with offer.lock:
            offer.waiting.append((message, time.monotonic()))
            if offer.running:
                return
            offer.running = True
        self._state.push_threads.submit(link, lambda: self._work(offer), offer.give_way)

    def link_down(self, link: Link) -> None:
        """The link has gone: forgets its offers."""
        self._state.push_threads.drop(link)
        peer_of(link).offers.clear()
        self._state.offers.forget(link.token)

    def end(self, link: Link, message: EndOffer) -> None:
        """Forgets an offer and stops what runs of it."""
        offer = peer_of(link).offers.pop(message.offer_id, None)
        if not isinstance(offer, ReceivedOffer):
            return
        with offer.lock:
            offer.ended = True
            parts, offer.waiting = offer.waiting, deque()
            flight = offer.flight
            held = offer.running  # by its work, also where that still waits for its turn
        peer_of(link).count_part(-len(parts))
        if not held:
            self._state.offers.give(link.token, offer.nbytes)
        for part, _ in parts:
            _reply(link, part, LLMStatusCode.LLM_TIMEOUT, _WITHDRAWN)
        if flight is not None:
            flight.cut(TransferTimeoutError(_WITHDRAWN))
        self._endings.decide((link, message.offer_id), ok=message.ok)

    # ---- moving (workers) ----------------------------------------------------------------------------------

    def _work(self, offer: ReceivedOffer) -> None:
        while parts := self._next(offer):
            message, received_at = parts[0]
            if len(parts) > 1:
                self._together(offer, [message for message, _ in parts])
            else:
                self._alone(offer, message, received_at if offer.is_push else time.monotonic())
            if self._state.push_threads.crowded and offer.waiting:  # it goes on when it is its turn again
                self._state.push_threads.submit(offer.link, lambda: self._work(offer), offer.give_way)
                return

    def _next(self, offer: ReceivedOffer) -> list[tuple[PartReady, float]]:
        """The part that is next, and those that wait right behind it; none: the work is over."""
        with offer.lock:
            parts: list[tuple[PartReady, float]] = []
            while offer.waiting and len(parts) < limits.LEASES_OF_A_READ:
                if parts and offer.waiting[0][0].part != parts[-1][0].part + 1:
                    break
                parts.append(offer.waiting.popleft())
            offer.running = bool(parts)
            over = offer.ended and not parts
        peer_of(offer.link).count_part(-len(parts))
        if over:
            link = offer.link
            link.call_soon(lambda: self._state.offers.give(link.token, offer.nbytes))
        return parts

    def _together(self, offer: ReceivedOffer, messages: list[PartReady]) -> None:
        """Reads layers that are all there in as few calls as can be; where that fails, one by one tells why.

        Each call of the system is a wait for the GIL where the main thread runs Python without a pause.
        """
        at = 0
        while at < len(messages):
            try:
                part_nbytes = self._plan_of(offer).target.row_nbytes * offer.offer.part_tensors
                some = messages[at : at + max(1, max(offer.together_nbytes, _TOGETHER_NBYTES) // part_nbytes)]
                began = time.monotonic()
                nbytes = self._read(offer, some, began)
                offer.together_nbytes = _next_together(nbytes, time.monotonic() - began)
            except GaveWayError as exc:
                for message in messages[at:]:
                    _reply(offer.link, message, exc.status_code, str(exc))
                return
            except Exception:
                for message in messages[at:]:
                    self._alone(offer, message, time.monotonic())
                return
            each = nbytes // len(some)
            with contextlib.suppress(LinkLost):
                for message in some:
                    offer.link.post(Done(id=message.id, code=LLMStatusCode.LLM_SUCCESS, nbytes=each))
                offer.link.flush()
            at += len(some)

    def _alone(self, offer: ReceivedOffer, message: PartReady, started: float) -> None:
        cost = time.thread_time()
        try:
            nbytes = self._read(offer, [message], started)
            done = Done(id=message.id, code=LLMStatusCode.LLM_SUCCESS, nbytes=nbytes)
            self._answer(offer, done)
        except LLMException as exc:
            cost = time.thread_time() - cost
            offer.link.charge(cost)
            time.sleep(cost)  # a peer whose parts all fail has the GIL half of the time, not all of it
            _reply(offer.link, message, exc.status_code, str(exc))
        except Exception as exc:
            text, peer = "part %d of a push by %s failed", describe(offer.link)
            self._say(logging.ERROR, offer.link, text, message.part, peer, exc_info=True)
            _reply(
                offer.link,
                message,
                LLMStatusCode.LLM_FAILED,
                f"{type(exc).__name__} at the destination: {exc}",
            )

    def _read(self, offer: ReceivedOffer, messages: list[PartReady], started: float) -> int:
        """Moves parts that follow each other; returns their bytes."""
        plan = self._plan_of(offer)
        first = messages[0].part * offer.offer.part_tensors
        count = min(offer.offer.part_tensors * len(messages), plan.source.tensor_count - first)
        if messages[0].part < 0 or count <= offer.offer.part_tensors * (len(messages) - 1):
            raise ParamInvalidError(
                f"part {messages[-1].part} of an offer of {plan.source.tensor_count} tensors"
            )
        deadline = started + max(0, min(message.time_left_ms for message in messages)) / 1000
        source, target = plan.source.tensors(first, count), plan.target.tensors(first, count)
        context = Context(offer.what, offer.link, started, LLMStatusCode.LLM_TIMEOUT)
        flight = self._begin(offer, plan, target)
        try:
            self._move(offer, messages, source, target, plan.bases, deadline, flight)
        except (Stale, MoveError, LinkLost, TimeoutError) as exc:
            flight.check()
            if isinstance(exc, Stale):  # the lease has ended: its initiator did that, and knows why
                when = "while it was being read" if exc.begun else "before it had begun"
                raise TransferTimeoutError(f"{context.where}: withdrawn by its initiator {when}") from exc
            raise context.failure(exc) from exc
        finally:
            self._state.flights.end(flight)
        return target.nbytes

    def _answer(self, offer: ReceivedOffer, done: Done) -> None:
        """The data is there: what the initiator says to it is made ready, unless it has given up, and it is told."""
        if offer.offer.notify is None:
            tell(offer.link, done)
            return
        name, text = offer.offer.notify
        with offer.lock:
            if offer.ended:
                raise TransferTimeoutError("withdrawn by its initiator before its notification")
            try:
                self._endings.park(offer.link, offer.offer.id, name, text, done)
            except LLMException as exc:
                raise error_of(
                    exc.status_code, f"the data is complete, but not its notification: {exc}"
                ) from exc
        offer.link.flush()

    def _begin(self, offer: ReceivedOffer, plan: OfferPlan, target: CacheSlice) -> Flight:
        state = self._state
        records = self._owners(plan.bases, target) if plan.records is None else plan.records
        with state.lock:
            state.check_open()
            for record in records:
                if state.registry.get(record.cache_id) is not record:
                    raise CacheNotExistError(f"cache {record.cache_id} was unregistered at the destination")
            flight = state.flights.begin(Flight(offer.link, tuple(r.cache_id for r in records)))
        with offer.lock:
            offer.flight = flight
            ended = offer.ended
        if ended:
            flight.cut(TransferTimeoutError(_WITHDRAWN))
        return flight

    def _move(
        self,
        offer: ReceivedOffer,
        messages: list[PartReady],
        source: CacheSlice,
        target: CacheSlice,
        bases: U64,
        deadline: float,
        flight: Flight,
    ) -> None:
        destination = target.extents(bases)
        check_destination(self._state, offer.link, offer.source.cache_id, source, target, destination)
        lease, *more = ((message.lease_id, codec.word_of(message.lease)) for message in messages)
        move(
            peer_of(offer.link),
            Wanted(offer.source, source, lease[1], offer.source.word, lease, tuple(more)),
            destination,
            deadline,
            flight,
        )

    def _say(self, level: int, link: Link, text: str, *args: object, exc_info: bool = False) -> None:
        self._state.links.log.say(level, link.address, text, *args, log=_LOG, exc_info=exc_info)

    # ---- planning (workers) ----------------------------------------------------------------------------------

    def _plan_of(self, offer: ReceivedOffer) -> OfferPlan:
        """The plan of the whole offer, made once: a bad one moves nothing of any part."""
        if offer.plan is None:
            try:
                plan = self._plan(offer)
                check_writable(self._state, plan.target.extents(plan.bases), plan.target.first_tensor)
                offer.plan = plan
            except LLMException as exc:
                offer.plan = exc.with_traceback(None)
                peer = describe(offer.link)
                self._say(logging.WARNING, offer.link, "refused a %s of %s: %s", offer.what, peer, exc)
        if isinstance(
            offer.plan, LLMException
        ):  # each raise has one of its own: it holds the frames it went through
            raise error_of(offer.plan.status_code, str(offer.plan)) from offer.plan.__cause__
        return offer.plan

    def _plan(self, offer: ReceivedOffer) -> OfferPlan:
        target_key = offer.offer.target
        if (target_key is not None) != self._state.accessible:
            here = "accessible" if self._state.accessible else "managed"
            raise ParamInvalidError(
                f"a push by {'key' if target_key else 'address'} to a cluster in {here} mode"
            )
        if target_key is None:
            return self._plan_by_address(offer)
        name, batch = codec.key_name(target_key), target_key.batch_index
        with self._state.lock:
            found = self._state.registry.find(name)
        if found is None:
            raise CacheNotExistError(f"no cache at the destination has the key {describe_name(name)}")
        record = found[0]
        check_accessible(record)
        source, target = self._plan_by_key(offer, record, batch, name)
        return OfferPlan(source, target, record.addresses, (record,))

    def _plan_by_key(
        self, offer: ReceivedOffer, record: Record, batch: int, name: KeyName
    ) -> tuple[CacheSlice, CacheSlice]:
        src, dst, message = offer.source.layout, record.layout, offer.offer
        layers = Layers(
            codec.layers_of(message.src_layers),
            codec.layers_of(message.dst_layers),
            message.tensors_per_layer,
        )
        if message.kind == "blocks":
            return planning.plan_blocks(src, offer.src_blocks, dst, offer.dst_blocks, layers)
        if message.kind == "layers":
            return layer_plans.plan_layers_by_key(
                src, message.source_batch, dst, batch,
                dst_is_blocks=record.is_blocks, blocks=offer.blocks, layers=layers,
            )  # fmt: skip
        if record.is_blocks:
            raise ParamInvalidError(
                f"{describe_name(name)} is a blocks cache; push_cache needs a cache, use push_blocks"
            )
        return planning.plan_slot_push(src, message.source_batch, dst, batch, layers)

    def _plan_by_address(self, offer: ReceivedOffer) -> OfferPlan:
        layers = Layers(codec.layers_of(offer.offer.src_layers), None, layer_plans.TENSORS_PER_LAYER)
        source, target = layer_plans.plan_layers_by_address(
            offer.source.layout, offer.offer.source_batch, len(offer.addresses), offer.blocks, layers
        )
        self._owners(offer.addresses, target)
        return OfferPlan(source, target, offer.addresses, None)

    def _owners(self, bases: U64, target: CacheSlice) -> tuple[Record, ...]:
        chosen = bases[target.first_tensor : target.first_tensor + target.tensor_count]
        offsets, lengths = layer_plans.written_units(chosen, target)
        with self._state.lock:
            memory = self._state.registry.open_memory()
        return tuple(memory.owners_of(chosen, offsets, lengths))


def _next_together(nbytes: int, seconds: float) -> int:
    """How much to read at once after a read of so many bytes took so long."""
    if nbytes * _TOGETHER_S >= _MOST_TOGETHER_NBYTES * seconds:
        return _MOST_TOGETHER_NBYTES
    return int(nbytes * _TOGETHER_S / seconds)


def _unknown(message: PartReady, count: int) -> tuple[LLMStatusCode, str]:
    if count >= limits.OFFERS:
        return (
            LLMStatusCode.LLM_OUT_OF_MEMORY,
            f"{count} pushes of this link are open there, which is the most",
        )
    return LLMStatusCode.LLM_FAILED, f"offer {message.offer_id} is not known (any more)"


def _reply(link: Link, message: PartReady, code: LLMStatusCode, text: str) -> None:
    tell(link, Done(id=message.id, code=code, text=text))
