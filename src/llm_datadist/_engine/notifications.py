"""Notifications: sending them, by themselves or after the data of a call, and fetching those that came.

How they get into the queue: see ``endings``.
"""

from __future__ import annotations

import time

from llm_datadist._core.notices import Notice, NoticeQueue
from llm_datadist._engine.endings import Endings
from llm_datadist._engine.errands import Call, interrupted
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.obligations import Ending
from llm_datadist._engine.state import State
from llm_datadist._link.link import LinkLost
from llm_datadist._waiting import Latch
from llm_datadist._wire.messages import Finish
from llm_datadist.clusters import Notify
from llm_datadist.status import LLMStatusCode

_TURN_S = 0.1  # for a busy control thread to read what has come


class Notifications:
    """What this engine and its peers say to each other."""

    def __init__(self, state: State, queue: NoticeQueue, endings: Endings) -> None:
        self._state = state
        self._queue = queue
        self._endings = endings

    @property
    def none_came(self) -> bool:
        """Whether there is nothing to take."""
        return self._queue.is_empty and not self._endings.pending

    def take_none(self, call: Call) -> list[Notify]:
        """Changes nothing, so any thread may do it, whatever it holds."""
        self._state.check_open()
        return []

    def take(self, call: Call) -> list[Notify]:
        """Empties the queue, which has it all again if the caller is interrupted."""
        state = self._state
        if self._endings.pending and not state.links.on_control_thread():
            self._read_decisions()
        with state.lock:
            state.check_open()
            taken = self._queue.take()
        if taken:
            call.on_drop(lambda: self._put_back(taken))
        return taken

    def _put_back(self, taken: list[Notify]) -> None:
        with self._state.lock:
            self._queue.put_back(taken)

    def _read_decisions(self) -> None:
        """A call of a peer may be decided by what has come and is not read yet: the peer has it behind it."""
        read = Latch()
        self._state.links.call_at(time.monotonic(), read.open)  # timers run after what had come before them
        read.wait(_TURN_S)

    def send(self, cluster_id: int, notice: Notice, call: Call) -> None:
        """Returns once it has its place in the peer's queue, within sync_kv_timeout.

        Raises:
            NotLinkedError: No link.
            OutOfMemoryError: The peer's queue is full.
            LinkFailedError: The link went down meanwhile.
            TransferTimeoutError: LLM_TIMEOUT.
        """
        state = self._state
        started = time.monotonic()
        flight = Flight(None, ())
        call.on_cut(lambda: flight.cut(interrupted()))

        def body() -> None:
            with state.lock:
                state.check_open()
                link = state.link_to(cluster_id)
                flight.over(link)
                state.flights.begin(flight)
            flight.run_here()
            context = Context(f"notification {notice.name!r:.80}", link, started, LLMStatusCode.LLM_TIMEOUT)
            try:
                Ending(flight).run(
                    lambda number: Finish(id=number, notify=(notice.name, notice.message)),
                    context,
                    started + state.timeout_s,
                )
            except (LinkLost, TimeoutError) as exc:
                flight.check()
                error = context.failure(exc)
                raise error from error.__cause__

        state.flights.fly(flight, body)
