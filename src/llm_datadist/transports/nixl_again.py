"""Reads with transport ``nixl`` that are made again and again: of a word, and of one unit of each tensor.

Strategy: what each such read repeats is made once. Whatever is not as it was, or fails, is an empty answer, and
the caller goes the plain way (``nixl_read``), which finds reasons. A session in which anything failed is doomed,
as there.
Invariant: no transfer is under way when a function has returned or raised.
Threads: any.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.transports._nixl import NixlLost, NixlRefused
from llm_datadist.transports.nixl_pages import first_hole
from llm_datadist.transports.nixl_read import MAX_RUNS, SLOW_S, Cut, Reach, finish, linger_s
from llm_datadist.transports.nixl_session import Session, Source, Word
from llm_datadist.transports.nixl_use import Use, used
from llm_datadist.transports.seam import OnCut

_MAX_NBYTES = 1 << 20
_PLAIN_S = 1.0
_WORD_NBYTES = 8


class Again(Reach, Protocol):
    """What these reads need of their channel."""

    def current(self, use: Use) -> Session | None:
        """The session that is there, entered; None: there is none, or it is over. The use must leave."""

    def find_one(self, address: int, nbytes: int) -> tuple[Source, ...]:
        """The sources of one range of the peer; none: it is out of reach."""


def word_again(reach: Again, address: int, deadline: float) -> int | None:
    """A word of the peer; None: not in this way."""
    if time.monotonic() >= deadline:
        return None
    return used(lambda use: _word(reach, use, address, deadline))


def _word(reach: Again, use: Use, address: int, deadline: float) -> int | None:
    session = reach.current(use)
    if session is None:
        return None
    value: int | None = None
    try:
        found = session.read_word(address)
        if found is None:
            found = _made(reach, session, address)
        if isinstance(found, Word):
            _finish(reach, session, found.transfer, deadline)
            value = found.value  # before another thread may have it
            session.keep_word(address, found)
        else:
            value = found
        use.under_way = False
    except (NixlLost, NixlRefused, Cut):
        value = None
    return value


def _made(reach: Again, session: Session, address: int) -> Word | int | None:
    sources = reach.find_one(address, _WORD_NBYTES)
    if not sources or not session.knows(sources):
        return None
    word = session.make_word(sources[0].memory, address)
    if word is not None:
        session.keep_word(address, word)
    return session.read_word(address)


def fit_one_step(tensors: int, nbytes: int) -> bool:
    """Whether ``nbytes`` of each tensor are so little that nobody need cut the transfer short."""
    return 0 < tensors <= MAX_RUNS and 0 < tensors * nbytes <= _MAX_NBYTES


class NixlRows:
    """Reads of one unit of each tensor, as the seam's ``Rows``.

    When NIXL has failed, or the network is so slow that somebody may want to cut a read off, it leaves them to the
    plain way for a while.

    Args:
        reach: The channel.
        sources: What holds the tensors there.
        memory: Kind of the memory here.
        rows: What holds the tensors here.
        there: Address of each tensor there.
        here: Address of each tensor here.
        nbytes: Bytes of a unit.
    """

    __slots__ = ("_here", "_lengths", "_memory", "_nbytes", "_reach", "_rows", "_sources", "_there", "_until")

    def __init__(
        self, reach: Again, sources: tuple[Source, ...], memory: str, rows: U64, there: U64, here: U64,
        nbytes: int,
    ) -> None:  # fmt: skip
        self._reach = reach
        self._sources = sources
        self._memory = memory
        self._rows = rows
        self._there = there
        self._here = here
        self._lengths = np.full(len(there), nbytes, dtype=np.uint64)
        self._nbytes = nbytes * len(there)
        self._until = 0.0  # then the while is over

    def read(self, there: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """One transfer."""
        cut = _Cuts()
        on_cut(cut.note)
        try:
            return used(lambda use: self._read(use, there, here, deadline, cut))
        finally:
            on_cut(None)

    def _read(self, use: Use, there: int, here: int, deadline: float, cut: _Cuts) -> bool:
        reach = self._reach
        now = time.monotonic()
        if now < self._until or now >= deadline or reach.closed or self._nbytes > reach.pace.nbytes:
            return False
        try:
            session = reach.session(use, self._sources, self._memory, self._rows)
        except (NixlLost, NixlRefused):
            use.under_way = False
            self._until = now + _PLAIN_S
            return False
        moved = False
        try:
            at, to = self._there + np.uint64(there), self._here + np.uint64(here)
            moved = self._move(session, at, to, deadline, cut)
            use.under_way = False
        except (NixlLost, NixlRefused):
            self._until = now + _PLAIN_S
        except Cut:
            pass
        return moved and not reach.closed

    def _move(self, session: Session, there: U64, here: U64, deadline: float, cut: _Cuts) -> bool:
        if self._memory == "host" and first_hole(here, self._lengths) is not None:
            return False
        if session.doomed or cut.noted:
            return False
        transfer = session.start((self._sources[0].memory, there), (self._memory, here), self._lengths)
        if transfer is not None:
            began = time.monotonic()
            _finish(self._reach, session, transfer, deadline, cut)
            session.release(transfer)
            ended = time.monotonic()
            if ended - began > SLOW_S:
                self._until = ended + _PLAIN_S
        return True


class _Cuts:
    """Whether a read was cut off."""

    __slots__ = ("noted",)

    def __init__(self) -> None:
        self.noted = False

    def note(self, reason: str) -> None:
        """From any thread."""
        self.noted = True


def _finish(reach: Again, session: Session, transfer: int, deadline: float, cut: _Cuts | None = None) -> None:
    def must_stop() -> bool:
        return reach.closed or (cut is not None and cut.noted) or time.monotonic() >= deadline

    finish(session, transfer, reach, must_stop, linger_s(reach, deadline))
