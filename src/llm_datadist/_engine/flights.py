"""What is in flight: every transfer that touches a cache of ours or uses a link.

So that it can be waited for and cut off.

Invariant: a flight that moves bytes ends only after its last byte; so "none left" means "nothing of ours
writes there any more".
Thread rule: they begin under the engine's lock; whoever waits is woken when one ends. Cuts happen outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llm_datadist._link.link import Link
from llm_datadist._waiting import Changes, Lasting
from llm_datadist.status import LLMException

T = TypeVar("T")
LAST_BYTES_S = 5.0  # after a cut: a mover finishes at most one call of 16 MiB
_CUTTING = threading.Lock()  # so that the first of two cuts decides


class Flight(Lasting):
    """One transfer, or a copy within this process (no link).

    Attributes:
        serving: A peer reads through us, nothing is written here.
        thread: The caller's thread that it keeps busy; None if it keeps none.
        reads: The peer's cache that it is reading now; 0: none.
    """

    __slots__ = (
        "_cancel",
        "_link",
        "_owed",
        "cache_ids",
        "error",
        "reads",
        "serving",
        "thread",
    )

    def __init__(self, link: Link | None, cache_ids: tuple[int, ...], *, serving: bool = False) -> None:
        self._link = link
        self.cache_ids = cache_ids
        self.serving = serving
        self.thread: int | None = None
        self.reads = 0
        self._under_way = None
        self.error: LLMException | None = None
        self._cancel: Callable[[str], None] | None = None
        self._owed: tuple[Callable[[], None], ...] = ()

    @property
    def link(self) -> Link:
        """The link of a transfer."""
        if self._link is None:
            raise ValueError("a copy within this process has no link")
        return self._link

    @property
    def has_link(self) -> bool:
        """Whether it is a transfer."""
        return self._link is not None

    def uses(self, link: Link) -> bool:
        """Whether it goes over that link."""
        return self._link is link

    def over(self, link: Link) -> None:
        """Says which link it goes over, before it begins."""
        self._link = link

    def run_here(self) -> None:
        """The calling thread is busy with it until it ends."""
        self.thread = threading.get_ident()

    def owes(self, settle: Callable[[], None]) -> None:
        """Calls ``settle`` before the flight ends; again where that was interrupted."""
        self._owed = (*self._owed, settle)

    def settle(self) -> None:
        """Does what it owes, the latest first."""
        for settle in reversed(self._owed):
            settle()

    @contextmanager
    def cancelling(self, cancel: Callable[[str], None]) -> Iterator[None]:
        """While inside, a cut calls ``cancel`` with its reason; at once if it was cut before."""
        self.on_cut(cancel)
        try:
            yield
        finally:
            self.on_cut(None)

    def on_cut(self, cancel: Callable[[str], None] | None) -> None:
        """From now on a cut calls ``cancel`` with its reason, at once if it was cut before; None: nothing."""
        # Stored, then looked at; ``cut`` does both the other way round, so that one of the two sees the other.
        self._cancel = cancel
        if cancel is not None and self.error is not None:
            cancel(str(self.error))

    def cut(self, error: LLMException) -> None:
        """Ends it with ``error``; the first cut decides. The caller does not hold the engine's lock."""
        with _CUTTING:
            if self.error is None:
                self.error = error
        cancel = self._cancel
        if cancel is not None:
            cancel(str(self.error))

    def check(self) -> None:
        """Raises what it was cut off with, if it was."""
        if self.error is not None:
            raise self.error


class Flights:
    """All flights of an engine."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._all: set[Flight] = set()  # each change of it is one step, and a copy is looked at

    def fly(self, flight: Flight, body: Callable[[], T]) -> T:
        """Runs ``body``, in which the flight may begin; at its end it has settled and ended, also by interrupts.

        They may keep ``end`` from running, but not a plain lock from being let go of.
        """
        with flight.during():
            try:
                result = body()
            finally:
                # Once more where that was interrupted, as by a second Ctrl-C, and a third. In no loop and no function
                # of its own: where they begin and go round, signals are looked for as well.
                try:
                    try:
                        try:
                            flight.settle()
                        except BaseException:
                            flight.settle()
                            raise
                    except BaseException:
                        flight.settle()
                        raise
                finally:
                    self.end(flight)
            return result

    def begin(self, flight: Flight) -> Flight:
        """Enters a flight. The caller holds the lock."""
        self._all.add(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Takes it out and wakes who waits; nothing if it is out."""
        self._all.discard(flight)
        self._changes.notify_all()

    def where(self, chosen: Callable[[Flight], bool]) -> list[Flight]:
        """The flights that a predicate picks."""
        under_way = list(self._all)
        over = [f for f in under_way if f.is_over]
        if over:
            self._all.difference_update(over)
        return [f for f in under_way if not f.is_over and chosen(f)]

    def cut(self, chosen: Callable[[Flight], bool], error: LLMException) -> None:
        """Cuts off what the predicate picks; one that only serves is out at once. The caller holds no lock."""
        picked = self.where(chosen)
        self._all.difference_update([f for f in picked if f.serving])
        self._changes.notify_all()
        for flight in picked:
            flight.cut(error)
