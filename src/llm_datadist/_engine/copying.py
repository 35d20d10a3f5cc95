"""Copies within this process: copy_cache, copy_blocks, swap_blocks.

The caller's thread moves the bytes, helped by the movers, through ``process_vm_readv`` on the own pid: a page
that the caller has unmapped is an error there, never a SIGSEGV. Each copy is a flight on the caches that it
touches, so that unregistering and deallocating wait for it. Threads: any.
"""

from __future__ import annotations

import math

import numpy as np

from llm_datadist._core.copy_plans import (
    Memory,
    copied_to,
    plan_copy_blocks,
    plan_copy_cache,
    plan_swap_blocks,
)
from llm_datadist._core.layout import Layout
from llm_datadist._core.requests import CopyBlocks, CopyCache, SwapBlocks
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._engine.destinations import check_writable
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.mapped import checked_addresses
from llm_datadist._engine.state import State
from llm_datadist._waiting import check_outside
from llm_datadist.caches import Cache
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalidError
from llm_datadist.transports.local_read import LocalRead, OwnProcess
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, FaultKind

_BUFFER_NBYTES = 16 << 20  # for blocks that are source and destination of one call
_NO_LIMIT = math.inf  # sync_kv_timeout is for transfers between processes
_AT_START = np.zeros(1, dtype=np.uint64)


class Copier:
    """Copies of this engine's callers."""

    def __init__(self, state: State, movers: Movers) -> None:
        self._state = state
        self._movers = movers
        self._process = OwnProcess()

    def copy(self, request: CopyCache | CopyBlocks | SwapBlocks) -> None:
        """Copies, or raises; nothing is written once it has returned.

        Raises:
            CacheNotExistError: A cache is not registered (any more).
            ParamInvalidError: A rule about kinds, indices, sizes or placements; memory that cannot be written.
            LLMException: LLM_FAILED, memory that cannot be read.
            LinkBusyError: The engine waits for this thread, which a signal handler has interrupted.
        """
        check_outside("a copy")
        match request:
            case CopyBlocks():
                self._copy_blocks(request)
            case CopyCache():
                src, dst = self._memory(request.src), self._memory(request.dst)
                self._run("copy_cache", (request.src, request.dst), plan_copy_cache(request, src, dst))
            case SwapBlocks():
                src, dst = self._memory(request.src), self._memory(request.dst)
                self._run("swap_blocks", (request.src, request.dst), plan_swap_blocks(request, src, dst))

    def _copy_blocks(self, request: CopyBlocks) -> None:
        memory = self._memory(request.cache)
        steps = plan_copy_blocks(request, memory, _BUFFER_NBYTES)
        written = copied_to(request, memory)
        flight = Flight(None, ())

        def body() -> None:
            self._begin((request.cache,), flight)
            self._check("copy_blocks", written)
            buffer = np.empty(0, dtype=np.uint8)
            for step in steps:
                if step.saved.nbytes > len(buffer):
                    buffer = np.empty(step.saved.nbytes, dtype=np.uint8)
                kept = _whole(buffer, step.saved.nbytes)
                self._move("copy_blocks", Segments(step.saved, kept), flight)
                self._move("copy_blocks", step.direct, flight)
                self._move("copy_blocks", Segments(kept, step.restored), flight)

        self._state.flights.fly(flight, body)

    def _run(self, what: str, caches: tuple[Cache, ...], plan: Segments) -> None:
        flight = Flight(None, ())

        def body() -> None:
            self._begin(caches, flight)
            self._check(what, plan.destination)
            self._move(what, plan, flight)

        self._state.flights.fly(flight, body)

    def _memory(self, cache: Cache) -> Memory:
        """Where a cache lies. A CPU cache is known to no engine: its memory is looked at now."""
        state = self._state
        if cache.is_cpu_cache:
            layout = Layout.of(cache.cache_desc)
            addresses = checked_addresses(cache.tensor_addrs, layout)
            return Memory(
                "the CPU cache", layout, addresses, cache.is_blocks_cache, cache.cache_desc.placement
            )
        with state.lock:
            state.check_open()
            record = state.record_of(cache)
        name = f"cache {record.cache_id}"
        return Memory(name, record.layout, record.addresses, record.is_blocks, record.desc.placement)

    def _begin(self, caches: tuple[Cache, ...], flight: Flight) -> None:
        state = self._state
        with state.lock:
            state.check_open()
            records = [state.record_of(cache) for cache in caches if not cache.is_cpu_cache]
            flight.cache_ids = tuple(r.cache_id for r in records)
            state.flights.begin(flight)

    def _check(self, what: str, destination: Extents) -> None:
        try:
            check_writable(self._state, destination)
        except ParamInvalidError as exc:
            raise ParamInvalidError(f"{what}: {exc}") from None

    def _move(self, what: str, plan: Segments, flight: Flight) -> None:
        flight.run_here()
        flight.check()
        read = LocalRead(self._process, self._movers, plan)
        with flight.cancelling(read.cancel):
            fault = read.wait(deadline=_NO_LIMIT).fault
        if fault is not None:
            flight.check()
            raise _error(what, fault) from fault.cause


def _whole(buffer: np.ndarray[tuple[int], np.dtype[np.uint8]], nbytes: int) -> Extents:
    start = np.array([buffer.ctypes.data], dtype=np.uint64)
    return Extents.of(start, _AT_START, np.array([nbytes], dtype=np.uint64))


def _error(what: str, fault: Fault) -> LLMException:
    if fault.kind is FaultKind.DESTINATION:
        return ParamInvalidError(
            f"{what}: the destination cannot be written: {fault.text}; use writable memory"
        )
    remedy = "; unregister before unmapping" if fault.kind is FaultKind.SOURCE else ""
    return LLMException(f"{what}: {fault.text}{remedy}", status_code=LLMStatusCode.LLM_FAILED)
