"""One read of transport ``nixl``: a plan cut into transfers, posted one after the other and waited for.

Strategy: a transfer is posted, looked at for a moment, then at growing intervals (no busy waiting); its size
follows how long the last one took, so that one which must stop usually just ends. One that does not end
within the linger time is cut with its session. What another read has cut is begun again.
Invariant: no transfer of this read is under way when ``wait`` has returned or raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llm_datadist._core.segments import U64, Extents, matched
from llm_datadist.transports._nixl import NixlLost, NixlRefused
from llm_datadist.transports.nixl_pages import first_hole
from llm_datadist.transports.nixl_session import Session, Source
from llm_datadist.transports.nixl_use import Use, used
from llm_datadist.transports.seam import Fault, FaultKind, Progress

MAX_RUNS = 4096
MIN_NBYTES, FIRST_NBYTES, MAX_NBYTES = 256 << 10, 4 << 20, 16 << 20
QUICK_S, SLOW_S = 0.005, 0.05  # transfers that took less may be larger, those that took more must be smaller
_SPIN_S = 50e-6
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3
_LINGER_SHARE = 0.1  # of the time of a read, which may end that much later
_LAST_BYTES_S = 0.1  # for a transfer whose channel was closed: its peer is mostly gone
_RETRIES = 2


@dataclass(slots=True)
class Pace:
    """How many bytes the next transfer of a channel should have."""

    nbytes: int = FIRST_NBYTES

    def note(self, nbytes: int, took_s: float) -> None:
        """How long the last one took."""
        if took_s > SLOW_S:
            self.nbytes = max(MIN_NBYTES, self.nbytes // 2)
        elif took_s < QUICK_S and nbytes >= self.nbytes:
            self.nbytes = min(MAX_NBYTES, self.nbytes * 2)


class Reach(Protocol):
    """What a read needs of its channel."""

    pace: Pace
    linger_s: float
    closed: bool
    proven: bool

    def session(self, use: Use, sources: tuple[Source, ...], memory: str, rows: U64) -> Session:
        """A session that knows this memory, entered. Whatever is raised, the use must leave.

        Raises:
            NixlLost: The peer cannot be reached; the text says why.
            NixlRefused: NIXL does not take this memory.
        """

    def lives(self, session: Session, use: Use) -> bool:
        """Ends a session that NIXL says is lost; whether the peer answers on a new one. The use must leave."""

    def distrust(self, sources: tuple[Source, ...]) -> None:
        """Leaves out what could not be read, until the peer tells of it again."""


class Task(Protocol):
    """What is to be moved, known to lie within registered memory on both sides."""

    nbytes: int
    sources: tuple[Source, ...]
    memory: str
    rows: U64

    def pieces(self, at: int, max_nbytes: int) -> tuple[U64, U64, U64]:
        """From byte ``at``: addresses there, addresses here, and bytes of each piece."""

    def hole(self, here: U64, nbytes: U64) -> int | None:
        """The first of these pieces of ours that is not wholly there to be written: its address."""

    def unwritable(self, at: int, max_nbytes: int) -> int | None:
        """An address of ours among these bytes that cannot be written."""


class Copy:
    """A plan as a ``Task``."""

    def __init__(
        self, sources: tuple[Source, ...], memory: str, rows: U64, there: Extents, here: Extents,
        can_write: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self.nbytes = here.nbytes
        self.sources = sources
        self.memory = memory
        self.rows = rows
        self._there = there
        self._here = here
        self._can_write = can_write

    def pieces(self, at: int, max_nbytes: int) -> tuple[U64, U64, U64]:
        """See ``Task``."""
        there, _ = self._there.take_pairs(at, max_nbytes, MAX_RUNS)
        here, _ = self._here.take_pairs(at, max_nbytes, MAX_RUNS)
        return matched(there, here)

    def hole(self, here: U64, nbytes: U64) -> int | None:
        """See ``Task``. UCX does not say that it has left something out."""
        return first_hole(here, nbytes) if self.memory == "host" else None

    def unwritable(self, at: int, max_nbytes: int) -> int | None:
        """See ``Task``."""
        if self.memory != "host":
            return None
        pairs, _ = self._here.take_pairs(at, max_nbytes, MAX_RUNS)
        for start, nbytes in pairs.tolist():
            pages = range(start - start % 4096 + 4096, start + nbytes, 4096)
            for address in (start, *pages):
                if not self._can_write(address):
                    return int(address)
        return None


class Cut(Exception):  # noqa: N818 - an answer
    """The session was ended by another read."""


def linger_s(reach: Reach, deadline: float) -> float:
    """How long a transfer of a read that begins now may go on when it should stop."""
    return min(reach.linger_s, max(0.0, deadline - time.monotonic()) * _LINGER_SHARE)


def finish(
    session: Session, transfer: int, reach: Reach, must_stop: Callable[[], bool], linger_s: float
) -> None:
    """Waits until a transfer has ended, or cuts it.

    Raises:
        Cut: It was cut, here or by another read; the session is doomed.
    """
    spin_until, sleep_s, limit = time.monotonic() + _SPIN_S, _FIRST_SLEEP_S, float("inf")
    try:
        while not session.ended(transfer):
            now = time.monotonic()
            if session.doomed or now >= limit:
                raise Cut
            if limit == float("inf") and must_stop():
                limit = now + (_LAST_BYTES_S if reach.closed else linger_s)
            if now < spin_until:
                time.sleep(0)
            else:
                time.sleep(sleep_s)
                sleep_s = min(1.5 * sleep_s, _LONGEST_SLEEP_S)
    except BaseException:
        session.doom()
        raise


class NixlRead:
    """A read under way.

    Args:
        reach: The channel.
        task: What to read; or the fault that it is not possible.
    """

    __slots__ = ("_at", "_cancelled", "_deadline", "_fault", "_linger_s", "_losses", "_reach", "_task")

    def __init__(self, reach: Reach, task: Task | Fault) -> None:
        self._reach = reach
        self._task = task
        self._cancelled: str | None = None
        self._fault: Fault | None = None
        self._at = 0
        self._losses = 0

    def cancel(self, reason: str = "") -> None:
        """Ends the read with the transfer in progress."""
        self._cancelled = reason or "cancelled"

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes. To be called once."""
        return used(lambda use: self.run(use, deadline))

    def run(self, use: Use, deadline: float) -> Progress:
        """The same for a caller who has a use."""
        task = self._task
        self._deadline = deadline
        self._linger_s = linger_s(self._reach, deadline)
        if isinstance(task, Fault):
            return Progress(0, self._fault if self._must_stop() else task)
        while self._at < task.nbytes and not self._must_stop():
            self._try(task, use)
        return Progress(self._at, self._fault)

    def _try(self, task: Task, use: Use) -> None:
        """Moves as far as it comes with one session."""
        reach, began = self._reach, time.monotonic()
        lost: tuple[Session, Exception] | None = None
        try:
            session = reach.session(use, task.sources, task.memory, task.rows)
            if not reach.proven:
                self._deadline += time.monotonic() - began  # an agent takes its time, whoever the peer is
            lost = self._go(session, task)
            use.under_way = lost is not None
        except NixlLost as exc:
            use.under_way = False
            text = f"the peer cannot be reached with NIXL: {exc}"
            self._fault = Fault(FaultKind.PEER_LOST, text, cause=exc)
        except NixlRefused as exc:
            use.under_way = False
            reach.distrust(task.sources)
            self._fault = Fault(FaultKind.CHANNEL, f"NIXL does not take this memory: {exc}", cause=exc)
        finally:
            use.leave()
        if lost is not None and not self._must_stop():
            self._explain(task, use, *lost)

    def _go(self, session: Session, task: Task) -> tuple[Session, Exception] | None:
        """With this one; what NIXL said, if it lost the peer."""
        try:
            while self._at < task.nbytes and not self._must_stop():
                self._transfer(session, task)
        except Cut:
            pass  # the bytes of this transfer are read again
        except (NixlLost, NixlRefused) as exc:
            return session, exc
        return None

    def _transfer(self, session: Session, task: Task) -> None:
        pace = self._reach.pace
        there, here, lengths = task.pieces(self._at, pace.nbytes)
        nbytes = int(lengths.sum())
        hole = task.hole(here, lengths)
        if hole is not None:
            text = f"the memory at {hole:#x} of this process is not all mapped and writable"
            self._fault = Fault(FaultKind.DESTINATION, text)
            return
        began = time.monotonic()
        if session.doomed:
            raise Cut
        transfer = session.start((task.sources[0].memory, there), (task.memory, here), lengths)
        if transfer is not None:
            finish(session, transfer, self._reach, self._must_stop, self._linger_s)
            session.release(transfer)
        self._at += nbytes
        pace.note(nbytes, time.monotonic() - began)

    def _explain(self, task: Task, use: Use, session: Session, lost: Exception) -> None:
        """NIXL has one answer for a peer that is gone and for memory that is: ask the peer."""
        try:
            lives = self._reach.lives(session, use)
        finally:
            use.leave()
        if not lives:
            text = "the peer is gone: UCX lost the connection, and makes no new one"
            self._fault = Fault(FaultKind.PEER_LOST, text, cause=lost)
            return
        self._losses += 1
        if self._losses < _RETRIES:
            return  # it may have been another read's fault
        nbytes = self._reach.pace.nbytes
        address = task.unwritable(self._at, nbytes)
        if address is not None:
            text = f"address {address:#x} of this process cannot be written"
            self._fault = Fault(FaultKind.DESTINATION, text, cause=lost)
            return
        self._reach.distrust(task.sources)
        text = f"memory of the peer cannot be read ({lost}), and the peer lives"
        self._fault = Fault(FaultKind.SOURCE, text, cause=lost)

    def _must_stop(self) -> bool:
        """Between transfers: whether there is a fault, by now."""
        if self._fault is None:
            if self._cancelled is not None or self._reach.closed:
                self._fault = Fault(FaultKind.CANCELLED, self._cancelled or "the channel was closed")
            elif time.monotonic() >= self._deadline:
                self._fault = Fault(FaultKind.TIMEOUT, "the time ran out while bytes were being read")
        return self._fault is not None
