"""Draining: no new transfers, those under way end, then the engine is idle and may be finalized.

A peer that reads by address asks nobody for a pull of its own (mode B), and a layer-wise push shows nothing
between two layers. So the announced table is withdrawn, and each peer is asked to say when its transfers with
us that had begun by then are over (``Settle``).
Threads: not for a caller's, so that a signal handler can wait for it whatever lock the code that it has
interrupted holds; transfers of the waiting thread itself do not count, for they cannot end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from llm_datadist._engine.asked import Question
from llm_datadist._engine.catalog import Catalog, flush
from llm_datadist._engine.errands import Call
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.settling import settle
from llm_datadist._engine.state import State, describe
from llm_datadist._link.link import Link
from llm_datadist._wire.messages import Settle
from llm_datadist.status import CacheNotExistError, LinkBusyError

GRACE_S = 0.1  # after the time, for the work to say what is still in flight
_LONGEST_WAIT_S = 3600.0  # of one look; what ends wakes us


class Draining:
    """Ends the transfers of one engine."""

    def __init__(self, state: State, catalog: Catalog) -> None:
        self._state = state
        self._catalog = catalog

    def drain(self, timeout_ms: int, caller: int, call: Call) -> None:
        """Returns when nothing is in flight. From now on nothing begins, also when this has raised.

        Transfers of the thread ``caller``, which waits, are not waited for.

        Raises:
            LinkBusyError: Transfers are still in flight when the time is over; what and with whom.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        work = _Work(self._state, self._catalog, deadline, caller, lambda: call.dropped)
        call.on_cut(self._state.condition.notify_all)
        left = work.run()
        if left:
            raise not_idle(timeout_ms, left)

    # ---- asked by a peer that drains --------------------------------------------------------------------

    def settle_asked(self, link: Link, message: Settle) -> Question:
        """Is answered when the transfers under way on this link have ended."""
        return _Settling(self._state, link, message)


class _Settling(Question):
    """A peer's question whether the transfers that were under way when it came have ended."""

    def __init__(self, state: State, link: Link, message: Settle) -> None:
        super().__init__(link, message.id, message.time_left_ms)
        self._state = state
        self._cache_id = message.cache_id
        self._begun: set[Flight] | None = None

    def is_over(self, now: float) -> bool:
        """See ``Question``."""
        flights = self._state.flights
        if self._begun is None:
            self._begun = set(flights.where(self._is_meant))
        return not flights.where(self._begun.__contains__)

    def begin(self) -> None:
        """Cuts off what reads a cache that was withdrawn."""
        if self._cache_id:
            text = f"{describe(self.link)}: its owner withdrew cache {self._cache_id} while it was being read"
            error = CacheNotExistError(f"{text}; register it there (again), then retry")
            self._state.flights.cut(self._is_meant, error)

    def _is_meant(self, flight: Flight) -> bool:
        return flight.uses(self.link) and (
            flight.reads == self._cache_id if self._cache_id else not flight.serving
        )


def not_idle(timeout_ms: int, left: str = "transfers are in flight") -> LinkBusyError:
    """The outcome of a drain whose time is over."""
    return LinkBusyError(
        f"not idle after {timeout_ms} ms: {left}; drain again to wait longer, or finalize to cut them off"
    )


class _Work:
    """One drain."""

    def __init__(
        self, state: State, catalog: Catalog, deadline: float, waiting_thread: int, gone: Callable[[], bool]
    ) -> None:
        self._state = state
        self._catalog = catalog
        self._deadline = deadline
        self._waiting_thread = waiting_thread
        self._gone = gone

    def run(self) -> str:
        """Until it is idle, or its time is over; what is still in flight, for a text."""
        self._close_doors()
        return self._settle_peers() or self._wait_idle()

    def _close_doors(self) -> None:
        state = self._state
        with state.lock:
            state.draining = True
            told = self._catalog.withdraw_all()
        flush(told)

    def _settle_peers(self) -> str:
        busy = [describe(link) for link in settle(self._state.links.links(), self._deadline)]
        return "transfers of " + ", ".join(busy) if busy else ""

    def _wait_idle(self) -> str:
        state = self._state
        with state.lock:
            while state.closed is None:
                now = time.monotonic()
                left, ends = self._look(now)
                if not left or now >= self._deadline or self._gone():
                    return left
                state.condition.wait(max(0.0, min([self._deadline, now + _LONGEST_WAIT_S, *ends]) - now))
        return ""  # finalized: everything was cut off

    def _look(self, now: float) -> tuple[str, list[float]]:
        """What is in flight, and when leases end by themselves. The caller holds the lock."""
        state = self._state
        state.leases.expire(now)
        flights = state.flights.where(lambda f: True)
        mine = [f for f in flights if f.thread == self._waiting_thread]
        leases = [x for x in state.leases.all() if not _is_of(mine, x.holder, x.expires_at)]
        parts = []
        if len(flights) > len(mine):
            parts.append(f"{len(flights) - len(mine)} transfers")
        if leases:
            parts.append(f"{len(leases)} reads by peers")
        return " and ".join(parts), [x.expires_at for x in leases]


def _is_of(flights: list[Flight], holder: bytes, expires_at: float) -> bool:
    """Whether a lease belongs to a push among these: one that ends only when its push does."""
    return expires_at == math.inf and any(f.link.token == holder for f in flights if f.has_link)
