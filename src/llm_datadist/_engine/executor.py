"""Runs one plan under a deadline, with the generation check around it.

One-sided: the words are read in a small call before the first data call (a cache already withdrawn
changes nothing here) and again after the last data call of all movers has returned. Otherwise the owner
does both. What went wrong leaves here as Stale or MoveError; the callers turn that into status codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import Peer
from llm_datadist.status import LLMStatusCode
from llm_datadist.transports.seam import Fault, FaultKind, Progress

_AT_START = np.zeros(1, dtype=np.uint64)
_WORD_NBYTES = np.full(1, 8, dtype=np.uint64)


class Stale(Exception):  # noqa: N818 - a fact, not an error of this code
    """What was to be read is not there any more. ``begun``: destination bytes may have changed."""

    def __init__(self, text: str, *, begun: bool) -> None:
        super().__init__(text)
        self.begun = begun


class MoveError(Exception):
    """The bytes did not all arrive."""

    def __init__(self, fault: Fault, nbytes: int) -> None:
        super().__init__(fault.text)
        self.fault = fault
        self.nbytes = nbytes


def move(
    peer: Peer, plan: Segments, words: Sequence[GenerationWord], deadline: float, flight: Flight
) -> None:
    """Moves all bytes of ``plan``, or raises.

    Args:
        peer: Whom to read.
        plan: What to read and where to put it.
        words: Words at the peer and the values that they must have (one-sided only).
        deadline: Instant of ``time.monotonic()``.
        flight: A cut of it ends the call.

    Raises:
        Stale: A word has changed.
        MoveError: Anything else that stopped it.
        LLMException: What the flight was cut off with.
    """
    if not plan.nbytes:
        return
    if peer.one_sided:
        _check_words(peer, words, deadline, flight, begun=False)
    progress = _read(peer, plan, deadline, flight)
    fault = progress.fault
    if fault is None:
        if peer.one_sided:
            _check_words(peer, words, deadline, flight, begun=True)
        peer.count_in(progress.nbytes)
        return
    if fault.kind is FaultKind.REFUSED and fault.code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
        raise Stale(fault.text, begun=progress.nbytes > 0)
    if fault.kind is FaultKind.SOURCE and peer.one_sided:
        _check_words(peer, words, deadline, flight, begun=True)
    raise MoveError(fault, progress.nbytes)


def _read(peer: Peer, plan: Segments, deadline: float, flight: Flight) -> Progress:
    completion = peer.channel.read(plan)
    with flight.cancelling(completion.cancel):
        progress = completion.wait(deadline=deadline)
    if progress.fault is not None:
        flight.check()
    return progress


def _words_at(addresses: Sequence[int]) -> Extents:
    """One word at each address. Twice in every pull, so without the merging of ``Extents.of``."""
    return Extents(np.array(addresses, dtype=np.uint64), _AT_START, _WORD_NBYTES, _WORD_NBYTES, 8)


def _check_words(
    peer: Peer, words: Sequence[GenerationWord], deadline: float, flight: Flight, *, begun: bool
) -> None:
    found = np.zeros(len(words), dtype=np.uint64)
    here = found.ctypes.data
    source = _words_at([word.address for word in words])
    destination = _words_at(range(here, here + 8 * len(words), 8))
    progress = _read(peer, Segments(source, destination), deadline, flight)
    if progress.fault is not None:
        raise MoveError(progress.fault, 0)
    for word, value in zip(words, found.tolist(), strict=True):
        if value != word.value:
            when = "while it was being read" if begun else "before it was read"
            raise Stale(f"its owner withdrew it {when}", begun=begun)
