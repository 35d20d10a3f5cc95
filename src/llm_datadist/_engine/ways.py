"""The ways to one peer's memory: the channels of a link, best first, and which of them a read takes.

A way that reaches only some of the memory is passed over where it does not reach; and where the runs are so
long that a later way that reads by address is as fast (``TransportCaps.best_below_nbytes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from llm_datadist._core.segments import Extents
from llm_datadist.transports.seam import (
    Channel,
    OneSidedChannel,
    PartialChannel,
    RegisteringChannel,
    Transport,
    TransportCaps,
)


@dataclass(frozen=True, slots=True)
class Way:
    """One channel of a link. What kind of channel it is, its transport's ``caps`` say."""

    name: str
    caps: TransportCaps
    channel: Channel
    by_address: OneSidedChannel | None  # the channel, if it reads by address

    @classmethod
    def of(cls, transport: Transport, channel: Channel) -> Way:
        """The way by a channel of that transport."""
        caps = transport.caps
        return cls(transport.name, caps, channel, cast(OneSidedChannel, channel) if caps.one_sided else None)

    @property
    def refusal(self) -> str:
        """Why it reaches nothing, now or for good; empty otherwise."""
        return cast(PartialChannel, self.channel).refusal if self.caps.partial else ""

    @property
    def refusal_cause(self) -> BaseException | None:
        """What the system reported, if that is why."""
        return getattr(self.channel, "refusal_cause", None)

    def settle(self, deadline: float) -> bool:
        """Waits for what the peer is still sending; whether it has come."""
        return cast(PartialChannel, self.channel).settle(deadline=deadline) if self.caps.partial else True

    def reaches(self, source: Extents, token: bytes) -> bool:
        """Whether it can read all of ``source``, memory of a cache whose owner gave ``token`` with it."""
        if not self.caps.partial:
            return True
        if self.caps.needs_registration and token:
            cast(RegisteringChannel, self.channel).admit(token)
        return cast(PartialChannel, self.channel).covers(source)

    def holds(self, destination: Extents) -> bool:
        """Whether it can write there, as far as that needs registration."""
        if not self.caps.needs_registration:
            return True
        return cast(RegisteringChannel, self.channel).holds(destination)


def way_for(
    ways: Sequence[Way], source: Extents, token: bytes, destination: Extents | None = None
) -> Way | None:
    """The way to read ``source``; None if none reaches it.

    One that cannot write to ``destination`` is taken only if there is no other: it says what is wrong.
    """
    best: Way | None = None
    unfit: Way | None = None
    for way in ways:
        if best is not None and not way.caps.one_sided:
            break
        if not way.reaches(source, token):
            continue
        if destination is not None and not way.holds(destination):
            unfit = unfit or way
            continue
        limit = way.caps.best_below_nbytes
        if limit is None or source.nbytes < limit * len(source.bases) * len(source.offsets):
            return way
        best = best or way
    return best or unfit
