"""Notifications: sending them, by themselves or after the data of a call, and the queue of those that came.

A sender that gives up says so (EndNotify). The receiver holds each notification back until what came with it
has been read, so a process that was stopped finds both and delivers nothing of a call that has failed.
"""

from __future__ import annotations

import time

from llm_datadist._core.notices import Notice, NoticeQueue, check_notice
from llm_datadist._engine.errands import Call, interrupted
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import State, describe, tell
from llm_datadist._link.link import Link, LinkLost, Pending
from llm_datadist._wire import messages as wire
from llm_datadist.clusters import Notify
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalidError


class Notifications:
    """What this engine and its peers say to each other."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._queue = NoticeQueue()

    # ---- callers --------------------------------------------------------------------------------------

    def take(self) -> list[Notify]:
        """Empties the queue."""
        state = self._state
        with state.lock:
            state.check_open()
            return self._queue.take()

    def send(self, cluster_id: int, notice: Notice, call: Call) -> None:
        """Returns once it is in the peer's queue, within sync_kv_timeout.

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
                self.deliver(flight, context, notice, started + state.timeout_s)
            except (LinkLost, TimeoutError) as exc:
                flight.check()
                raise context.failure(exc) from None

        state.flights.fly(flight, body)

    def deliver(self, flight: Flight, context: Context, notice: Notice, deadline: float) -> None:
        """Says it to the flight's peer and waits until it is in the queue there.

        Raises:
            LinkLost: The link went down, or the flight was cut.
            TimeoutError: No answer by the deadline.
            LLMException: What the peer refused it with.
        """
        link = flight.link
        message = wire.Notify(id=link.next_id(), name=notice.name, message=notice.message)
        pending = link.call(message)
        try:
            with flight.cancelling(lambda reason: pending.finish(None, reason)):
                answer = self._wait(pending, link, message.id, deadline)
        except BaseException:
            tell(link, wire.EndNotify(notify_id=message.id))
            pending.discard()
            raise
        if not isinstance(answer, wire.Done):
            raise context.lost(f"unexpected answer {type(answer).__name__}")
        if answer.code != LLMStatusCode.LLM_SUCCESS:
            raise context.refused(answer.code, answer.text)

    def _wait(self, pending: Pending, link: Link, message_id: int, deadline: float) -> wire.AnyMessage:
        try:
            return pending.wait(deadline).message
        except TimeoutError:
            # It may be in the queue already: only the peer's answer says whether this call has failed.
            tell(link, wire.EndNotify(notify_id=message_id))
            return pending.wait(time.monotonic() + self._state.grace_s).message

    # ---- peers (control thread; ``enter`` from any) ------------------------------------------------------

    def received(self, link: Link, message: wire.Notify) -> None:
        """A notification came: in the queue after this turn of the control thread, unless it is withdrawn."""
        state = self._state
        try:
            notify = _checked(link, message.name, message.message)
            with state.lock:
                state.check_open()
                self._queue.park((link, message.id), notify)
        except LLMException as exc:
            tell(link, wire.Done(id=message.id, code=exc.status_code, text=str(exc)))
            return
        state.links.call_soon(lambda: self._admit(link, message.id))

    def withdrawn(self, link: Link, message: wire.EndNotify) -> None:
        """Its sender has given up."""
        with self._state.lock:
            was_parked = self._queue.withdraw((link, message.notify_id))
        if was_parked:
            text = "withdrawn by its sender"
            tell(link, wire.Done(id=message.notify_id, code=LLMStatusCode.LLM_TIMEOUT, text=text))

    def enter(self, link: Link, name: str, message: bytes) -> None:
        """Queues what came with a push whose data is there.

        Raises:
            ParamInvalidError: Longer than is allowed.
            OutOfMemoryError: The queue is full.
        """
        notify = _checked(link, name, message)
        with self._state.lock:
            self._queue.put(notify)

    def _admit(self, link: Link, message_id: int) -> None:
        with self._state.lock:
            if link.down_reason is not None:  # its sender was told that the link failed
                self._queue.withdraw((link, message_id))
                return
            admitted = self._queue.admit((link, message_id))
        if admitted:
            tell(link, wire.Done(id=message_id, code=LLMStatusCode.LLM_SUCCESS))


def _checked(link: Link, name: str, message: bytes) -> Notify:
    try:
        check_notice(Notice(name, message))
    except ParamInvalidError as exc:
        raise ParamInvalidError(f"a notification of {describe(link)}: {exc}") from None
    return Notify(link.cluster_id, name, message)
