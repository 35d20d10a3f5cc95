"""Asking peers to say when their transfers with us that have begun by now are over (``Settle``).

For what cannot be seen from here: a peer that reads by address in mode B asks nobody, and one whose lease has
ended goes on until its next look at the word. Not for the control thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from llm_datadist._link.link import Link, LinkLost, Pending
from llm_datadist._wire.messages import Done, Settle
from llm_datadist.status import LLMStatusCode, code_of


def settle(links: Iterable[Link], deadline: float, cache_id: int = 0) -> list[Link]:
    """Asks all at once and waits; returns the links whose peers are not done, or not known to be.

    Args:
        links: Whom to ask.
        deadline: Instant of ``time.monotonic()``.
        cache_id: A cache that was withdrawn: reads of it are cut off, and no others waited for. 0: all transfers.
    """
    asked: list[tuple[Link, Pending]] = []
    for link in links:
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            question = Settle(id=link.next_id(), time_left_ms=left_ms, cache_id=cache_id)
            asked.append((link, link.call(question)))
        except LinkLost:
            continue
    return [link for link, pending in asked if not _has_settled(pending, deadline)]


def _has_settled(pending: Pending, deadline: float) -> bool:
    try:
        answer = pending.wait(deadline).message
    except LinkLost:
        return True
    except TimeoutError:
        pending.close()
        return False
    return isinstance(answer, Done) and code_of(answer.code) == LLMStatusCode.LLM_SUCCESS
