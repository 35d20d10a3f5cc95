"""Which connections may send a long selector now: it costs memory and time of the thread that serves all.

Strategy: what a request claims is looked at before it is received. A long selector is received when there is
room among those of its link and of all links, and when its link has not used up its share of the serving thread
with those before; until then it waits in the socket. One that does not come to its end loses its room.
Threads: the serving thread alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from llm_datadist._core import limits
from llm_datadist._core.budget import Budget
from llm_datadist._core.share import Share

_LOOK_S = 1.0  # between looks at those that do not come to their end, while others wait


class Asking(Protocol):
    """A connection, as it is seen here.

    Attributes:
        busy: A request is being answered.
    """

    busy: bool

    @property
    def claimed(self) -> int:
        """Bytes of the selector that is coming in; 0: none is."""

    @property
    def token(self) -> bytes:
        """Of its link."""


@dataclass(slots=True)
class _Held:
    nbytes: int
    since: float


class Room:
    """The long selectors of all links.

    Attributes:
        waiting: Connections that wait for room.
    """

    def __init__(self) -> None:
        self._budget = Budget(limits.SELECTORS_NBYTES, limits.SELECTORS_ENGINE_NBYTES)
        self._shares: dict[bytes, Share] = {}
        self._holders: dict[Asking, _Held] = {}
        self.waiting: dict[Asking, None] = {}

    def admits(self, connection: Asking) -> bool:
        """Whether more of it may be received now; if not, it waits, and ``admitted`` will name it."""
        nbytes = connection.claimed
        if nbytes <= limits.LONG_SELECTOR_NBYTES or connection in self._holders:
            return True
        now = time.monotonic()
        share = self._shares.get(connection.token)
        may_spend = share is None or share.rest_s(now) <= 0
        if may_spend and self._budget.take(connection.token, nbytes):
            self._holders[connection] = _Held(nbytes, now)
            self.waiting.pop(connection, None)
            return True
        self.waiting[connection] = None
        return False

    def holds(self, connection: Asking) -> bool:
        """Whether it has room for its selector."""
        return connection in self._holders

    def spend(self, connection: Asking, seconds: float) -> None:
        """So long did its selector keep the others waiting."""
        share = self._shares.get(connection.token)
        if share is None:
            share = self._shares[connection.token] = Share(
                limits.SELECTORS_BURST_S, limits.SHARE, time.monotonic()
            )
        share.spend(seconds)

    def give_back(self, connection: Asking) -> None:
        """Its selector is needed no more, or it has gone."""
        self.waiting.pop(connection, None)
        held = self._holders.pop(connection, None)
        if held is not None:
            self._budget.give(connection.token, held.nbytes)

    def forget(self, token: bytes) -> None:
        """The link has gone."""
        self._budget.forget(token)
        self._shares.pop(token, None)

    def admitted(self) -> list[Asking]:
        """Those that waited and may go on."""
        return [connection for connection in list(self.waiting) if self.admits(connection)]

    def stalled(self) -> list[Asking]:
        """Those that have kept room from others for long, and do not come to their end."""
        if not self.waiting:
            return []
        late = time.monotonic() - limits.HANDSHAKE_S
        return [c for c, held in self._holders.items() if held.since < late and not c.busy]

    def look_again_s(self) -> float | None:
        """When ``admitted`` and ``stalled`` are to be asked again without an event; None: never."""
        if not self.waiting:
            return None
        now = time.monotonic()
        rests = (share.rest_s(now) for share in self._shares.values())
        return min((rest for rest in rests if rest > 0), default=_LOOK_S)
