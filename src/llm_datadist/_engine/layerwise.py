"""Layer-wise pushes: one offer per config, one part per layer, pipelined while the model computes.

The task's thread runs the synchronizer and sends; answers and time-outs come on the control thread. A
layer's time runs from its sending, or from the end of the layer before it, whichever is later, so neither
the synchronizer nor a queue of layers counts as transfer time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from llm_datadist._core.layer_plans import TENSORS_PER_LAYER, LayerBlocks, check_push_layers, source_slot
from llm_datadist._core.leases import Lease
from llm_datadist._core.registry import Record, request_name
from llm_datadist._core.requests import Layers, PushLayers
from llm_datadist._engine.errands import Call
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.offering import Offering, OfferTerms
from llm_datadist._engine.state import State, peer_of
from llm_datadist._link.link import LinkLost, Pending
from llm_datadist._wire.messages import Done
from llm_datadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalidError
from llm_datadist.tasks import CacheTask, TaskBook


class LayerPusher:
    """Layer-wise tasks of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    def push_layers(self, request: PushLayers, call: Call) -> CacheTask:
        """Checks in the caller, then works in the background.

        Raises:
            CacheNotExistError: The source cache.
            ParamInvalidError: A rule of the caller's side.
        """
        state = self._state
        with state.lock:
            state.check_open()
            state.check_admitting()
            record = state.record_of(request.cache)
        blocks = check_push_layers(request, record.layout)
        runs: list[_Run] = []
        book = TaskBook(len(request.configs), lambda: _cancel(runs), state.run_callbacks, state.do_elsewhere)
        task = state.dropped.watch(book, _name(request))
        call.on_drop(task.cancel)
        configs: Sequence[TransferConfig | TransferWithCacheKeyConfig] = request.configs
        try:
            for at, config in enumerate(configs):
                run = _Run(state, record, book, at, config, blocks)
                runs.append(run)
                run.open()
        except BaseException:
            _cancel(runs)
            raise
        state.workers.submit(book, lambda: _drive(request.synchronizer, runs), lambda exc: _refuse(runs, exc))
        return task


def _refuse(runs: list[_Run], error: LLMException) -> None:
    for run in runs:
        run.refuse(error)


def _cancel(runs: list[_Run]) -> None:
    for run in runs:
        run.abort()


def _drive(synchronizer: LayerSynchronizer, runs: list[_Run]) -> None:
    """The task's thread: each layer of any config once, in ascending order."""
    for layer in sorted({layer for run in runs for layer in run.layers}):
        if all(run.finished for run in runs):
            return
        error = _synchronize(synchronizer, layer)
        for run in runs:
            if error is not None:
                run.stop_after_sent(error)
            elif layer in run.layers:
                run.send(layer)
        if error is not None:
            return
    # A config without a layer of its own has nothing to wait for.
    for run in runs:
        run.finish_if_empty()


def _synchronize(synchronizer: LayerSynchronizer, layer: int) -> LLMException | None:
    """Runs the user's code; what it says or raises ends the configs that are not complete."""
    try:
        ready = synchronizer.synchronize_layer(layer, None)
    except BaseException as exc:
        error = LLMException(
            f"synchronize_layer({layer}) raised {type(exc).__name__}: {exc}; layers from {layer} on were not sent",
            status_code=LLMStatusCode.LLM_FAILED,
        )
        error.__cause__ = exc
        return error
    if not ready:
        return ParamInvalidError(
            f"synchronize_layer({layer}) returned {ready!r}, not True; layers from {layer} on were not sent"
        )
    return None


class _Run:
    """One config of a task. Its lock is never held while the engine's is waited for by someone who holds it."""

    def __init__(
        self,
        state: State,
        record: Record,
        book: TaskBook,
        at: int,
        config: TransferConfig | TransferWithCacheKeyConfig,
        blocks: LayerBlocks,
    ) -> None:
        self._state = state
        self._record = record
        self._book = book
        self._at = at
        self._config = config
        layers = config.src_layer_range
        self.layers = (
            layers
            if layers is not None and len(layers)
            else range(record.layout.num_tensors // TENSORS_PER_LAYER)
        )
        self._terms = _terms(config, blocks, source_slot(config, record.is_blocks))
        self._lock = threading.RLock()
        self._waiting: deque[tuple[Pending, Lease, int]] = deque()
        self._sent = 0
        self._done = 0
        self._ending: LLMException | None = None
        self._flight: Flight | None = None
        self._offering: Offering | None = None
        self._cancel_timer: Callable[[], None] = _nothing
        self._started = time.monotonic()
        self.finished = False

    # ---- the task's thread ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Finds the link; a config without one ends here."""
        state = self._state
        try:
            with state.lock:
                state.check_open()
                link = state.link_to(_peer(self._config))
                if state.registry.get(self._record.cache_id) is not self._record:
                    raise ParamInvalidError(f"src_cache {self._record.cache_id} was unregistered")
                flight = state.flights.begin(Flight(link, (self._record.cache_id,)))
        except LLMException as exc:
            self._finish(exc)
            return
        self._flight = flight
        self._offering = Offering(state, link, self._record, self._terms)
        flight.on_cut(lambda _: self._finish(flight.error))

    def send(self, layer: int) -> None:
        """Lets the peer read a layer that is computed."""
        with self._lock:
            if self.finished or self._offering is None:
                return
            self._started = time.monotonic()
            try:
                pending, lease = self._offering.send_part(
                    layer - self.layers.start, self._state.options.sync_kv_timeout_ms
                )
            except LinkLost as exc:
                self._finish(self._context().lost(exc))
                return
            self._sent += 1
            self._waiting.append((pending, lease, layer))
            if len(self._waiting) == 1:
                self._start_timer()
        self._book.begin(self._at)
        pending.add_done_callback(self._answered)

    def stop_after_sent(self, error: LLMException) -> None:
        """No more layers: end with ``error`` once those that were sent have arrived; complete ones stay so."""
        with self._lock:
            if self.finished or self._sent == len(self.layers):
                return
            self._ending = error
            if not self._waiting:
                self._finish(error)

    def finish_if_empty(self) -> None:
        """A config whose range names no layer is complete."""
        if not len(self.layers):
            self._finish(None)

    def refuse(self, error: LLMException) -> None:
        """There is no thread for the task."""
        self._finish(error)

    def abort(self) -> None:
        """The task was cancelled; its book has the results already."""
        self._finish(LLMException("the task was cancelled", status_code=LLMStatusCode.LLM_FAILED))

    # ---- the control thread ---------------------------------------------------------------------------------

    def _answered(self, pending: Pending) -> None:
        with self._lock:
            entry = next((e for e in self._waiting if e[0] is pending), None)
            if entry is None or self.finished:
                return
            error = self._error_of(pending, entry[1])
            if error is not None:
                self._finish(error)
                return
            was_first = self._waiting[0] is entry
            self._waiting.remove(entry)
            if self._offering is not None:
                self._offering.end_part(entry[1])
            self._done += 1
            if was_first:
                self._start_timer()
            if self._done == len(self.layers):
                self._finish(None)
            elif self._ending is not None and not self._waiting:
                self._finish(self._ending)

    def _error_of(self, pending: Pending, lease: Lease) -> LLMException | None:
        context = self._context()
        try:
            answer = pending.wait(0.0).message
        except (LinkLost, TimeoutError) as exc:
            return context.failure(exc)
        if not isinstance(answer, Done):
            return context.lost(f"unexpected answer {type(answer).__name__}")
        if answer.code != LLMStatusCode.LLM_SUCCESS:
            offering = self._offering
            if offering is None:
                return context.refused(answer.code, answer.text)
            return offering.refusal(context, answer, lease)
        peer_of(context.link).count_out(answer.nbytes)
        return None

    def _start_timer(self) -> None:
        """The oldest layer that is out has sync_kv_timeout from now."""
        self._cancel_timer()
        self._cancel_timer = _nothing
        if self._waiting:
            watched = self._waiting[0][0]
            handle = self._state.links.call_at(
                time.monotonic() + self._state.timeout_s, lambda: self._late(watched)
            )
            self._cancel_timer = handle.cancel

    def _late(self, watched: Pending) -> None:
        with self._lock:
            if not self.finished and self._waiting and self._waiting[0][0] is watched and not watched.done:
                self._finish(self._context().timed_out())

    # ---- both -------------------------------------------------------------------------------------------------

    def _context(self) -> Context:
        flight = self._flight
        if flight is None:
            raise RuntimeError("a run without a flight sends nothing")
        layer = self._waiting[0][2] if self._waiting else self.layers.start
        what = f"layer {layer} of a layer-wise push of cache {self._record.cache_id} (config {self._at})"
        return Context(what, flight.link, self._started, LLMStatusCode.LLM_TIMEOUT)

    def _finish(self, error: LLMException | None) -> None:
        """Ends the run once: leases first, so that nothing begins after its result is known."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
            waiting, self._waiting = list(self._waiting), deque()
            self._cancel_timer()
        for pending, _, _ in waiting:
            pending.close()
        if self._offering is not None:
            self._offering.withdraw()
        if self._flight is not None:
            self._state.flights.end(self._flight)
        code = error.status_code if error is not None else LLMStatusCode.LLM_SUCCESS
        self._book.finish(self._at, code, error)


def _name(request: PushLayers) -> str:
    peers = ", ".join(str(_peer(config)) for config in request.configs)
    return f"a layer-wise push of cache {request.cache.cache_id} to clusters {peers}"


def _peer(config: TransferConfig | TransferWithCacheKeyConfig) -> int:
    return config.dst_cluster_id if isinstance(config, TransferConfig) else config.cache_key.cluster_id


def _nothing() -> None:
    return None


def _terms(
    config: TransferConfig | TransferWithCacheKeyConfig, blocks: LayerBlocks, source_batch: int
) -> OfferTerms:
    if isinstance(config, TransferConfig):
        return OfferTerms(
            "layers",
            TENSORS_PER_LAYER,
            Layers(config.src_layer_range, None, TENSORS_PER_LAYER),
            addresses=np.array(config.dst_addrs, dtype=np.uint64),
            source_batch=source_batch,
            unit_nbytes=blocks.unit_nbytes,
            src_blocks=blocks.src,
            dst_blocks=blocks.dst,
        )
    key: BlocksCacheKey | CacheKeyByIdAndIndex = config.cache_key
    return OfferTerms(
        "layers",
        TENSORS_PER_LAYER,
        Layers(config.src_layer_range, config.dst_layer_range, TENSORS_PER_LAYER),
        (request_name(key), key.batch_index if isinstance(key, CacheKeyByIdAndIndex) else 0),
        source_batch=source_batch,
        unit_nbytes=blocks.unit_nbytes,
        src_blocks=blocks.src,
        dst_blocks=blocks.dst,
    )
