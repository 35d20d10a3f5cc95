"""The dials under way: their deadlines, attempts and results. Control thread only, but for ``errors``."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_datadist._link import table as t
from llm_datadist._link.connection import Connection, ends_of
from llm_datadist._link.dialer import Connector, numeric
from llm_datadist._link.link import Link
from llm_datadist._link.loop import ControlLoop, TimerHandle
from llm_datadist._link.seam import Address, Target
from llm_datadist._logs import get_logger
from llm_datadist._shortages import reason_of
from llm_datadist._wire.proofs import Ends
from llm_datadist.status import LLMStatusCode

_log = get_logger("llm_datadist.link")
LINKED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
_UNHEARD = "no answer"


@dataclass(slots=True)
class Dial:
    """One entry of one ``LinkService.dial``.

    Attributes:
        failure: Why its last attempt came to nothing.
        quiet: Its failure is noted in ``Dials.errors`` but not logged.
        given_up: Nobody wants its result any more.
    """

    target: Target
    began: float
    deadline: float
    done: Callable[[LLMStatusCode], None]
    failure: str = _UNHEARD
    quiet: bool = False
    given_up: bool = False
    expiry: TimerHandle | None = None
    retry: TimerHandle | None = None
    connector: Connector | None = None
    conn: Connection | None = None


class Dials:
    """Carries out the table's actions that are about dials.

    Attributes:
        errors: Cluster id -> why its last dial failed.
    """

    def __init__(
        self,
        loop: ControlLoop,
        table: t.LinkTable,
        apply: Callable[[Sequence[t.Action]], None],
        open_connection: Callable[[socket.socket, Address, Ends, int, Dial], Connection],
        link_of: Callable[[int], Link | None],
    ) -> None:
        self._loop = loop
        self._table = table
        self._apply = apply
        self._open_connection = open_connection
        self._link_of = link_of
        self._dials: dict[int, Dial] = {}
        self._stopped = False
        self.errors: dict[int, str] = {}

    def begin(
        self,
        ticket: int,
        target: Target,
        deadline: float,
        done: Callable[[LLMStatusCode], None],
        *,
        quiet: bool = False,
    ) -> None:
        """``done`` is called once, at the deadline at the latest."""
        if self._stopped:
            done(LLMStatusCode.LLM_ENGINE_FINALIZED)
            return
        dial = self._dials[ticket] = Dial(target, time.monotonic(), deadline, done, quiet=quiet)
        dial.expiry = self._loop.call_at(deadline, lambda: self._expire(ticket))
        self._apply(self._table.dial(ticket, target.cluster_id))

    def cancel(self, tickets: Sequence[int]) -> None:
        """The caller wants no more of them."""
        for ticket in tickets:
            if ticket in self._dials:
                self._dials[ticket].given_up = True
            self._apply(self._table.expired(ticket, LLMStatusCode.LLM_FAILED, "the call was interrupted"))

    def stop(self, reason: str) -> None:
        """Ends all of them, and every later one at once."""
        self._stopped = True
        for ticket in list(self._dials):
            self._apply(self._table.expired(ticket, LLMStatusCode.LLM_ENGINE_FINALIZED, reason))

    def deadline_of(self, ticket: int) -> float:
        """When it must be over; 0 if it is."""
        dial = self._dials.get(ticket)
        return 0.0 if dial is None else dial.deadline

    def carry_out(self, action: t.Connect | t.Retry | t.Abandon | t.Finish) -> None:
        """Does it, unless the dial is over."""
        dial = self._dials.get(action.ticket)
        if dial is None:
            return
        match action:
            case t.Connect(ticket):
                address = dial.target.address
                dial.connector = Connector(
                    self._loop, address, lambda *result: self._connected(ticket, *result)
                )
                dial.connector.start()
            case t.Retry(ticket, delay_s):
                dial.conn = None
                dial.retry = self._loop.call_at(
                    time.monotonic() + delay_s, lambda: self._apply(self._table.retry_due(ticket))
                )
            case t.Abandon():
                self._abandon(dial)
            case t.Finish(ticket, code, text):
                self._finish(ticket, dial, code, text)

    def _expire(self, ticket: int) -> None:
        dial = self._dials.get(ticket)
        if dial is not None:
            self._apply(self._table.expired(ticket, LLMStatusCode.LLM_TIMEOUT, dial.failure))

    def _connected(self, ticket: int, sock: socket.socket | None, reason: str) -> None:
        dial = self._dials[ticket]
        dial.connector = None
        if sock is None:
            self.failed(ticket, reason)
            return
        try:
            address, ends = numeric(sock.getpeername()), ends_of(sock)
            dial.conn = self._open_connection(sock, address, ends, ticket, dial)
        except OSError as error:
            sock.close()
            self.failed(ticket, reason_of(error))

    def failed(self, ticket: int, reason: str) -> None:
        """An attempt came to nothing."""
        dial = self._dials.get(ticket)
        if dial is not None:
            dial.failure, dial.conn = reason, None
        if dial is not None and dial.quiet:  # one attempt: its caller has other addresses to try
            self._apply(self._table.refused(ticket, LLMStatusCode.LLM_LINK_FAILED, reason, ""))
        else:
            self._apply(self._table.connect_failed(ticket, reason))

    def _abandon(self, dial: Dial) -> None:
        if dial.retry is not None:
            dial.retry.cancel()
        if dial.connector is not None:
            dial.connector.cancel()
        if dial.conn is not None:
            dial.conn.ticket = None  # it is no attempt any more
            dial.conn.close("the dial was given up")

    def _finish(self, ticket: int, dial: Dial, code: LLMStatusCode, text: str) -> None:
        del self._dials[ticket]
        for timer in (dial.expiry, dial.retry):
            if timer is not None:
                timer.cancel()
        cluster_id = dial.target.cluster_id
        link = self._link_of(cluster_id)
        if code in LINKED and link is None:
            code, text = LLMStatusCode.LLM_LINK_FAILED, "the link went down again at once"
        if link is not None and code in LINKED:
            link.dialled = True
            self.errors.pop(cluster_id, None)
        elif not (dial.quiet and dial.given_up):
            elapsed_ms = round((time.monotonic() - dial.began) * 1000)
            reason = f"no link to cluster {cluster_id} at {dial.target.address} after {elapsed_ms} ms: {text}"
            self.errors[cluster_id] = reason
            if not dial.quiet:
                _log.warning("%s (%s)", reason, code.name)
        dial.done(code)

    def close_after_fork(self) -> None:
        """In a forked child: closes descriptors, nothing else."""
        for dial in list(self._dials.values()):
            if dial.connector is not None:
                dial.connector.close_after_fork()
