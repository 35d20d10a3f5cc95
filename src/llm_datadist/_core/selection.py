"""Which transport reads a peer, and why: a pure function of both sides' offers and the probes' answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

AUTO = "auto"
PREFERENCE = ("shm", "local", "nixl", "tcp")  # same-host memory first, then engines, then plain sockets
_NOT_OFFERED = {"shm": "the peer shares no memory: it has no pool, or its system does not let it"}
_REACH = {"shm": "small blocks in the peer's pools", "nixl": "memory registered with NIXL"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The transports chosen, best first, and one line for and against each that was looked at.

    More than one: each but the last reaches only some of the peer's memory. None: nothing reads the peer.
    """

    names: tuple[str, ...]
    reasons: tuple[str, ...]


def candidates(mine: Sequence[str], backend: str, peer_backend: str) -> tuple[str, ...]:
    """The transports worth probing, best first. A backend that either side forces is the only one."""
    forced = [b for b in (backend, peer_backend) if b != AUTO]
    if len(set(forced)) > 1:
        return ()
    return tuple(n for n in PREFERENCE if n in mine and (not forced or n == forced[0]))


def choose(
    mine: Sequence[str],
    offered: Mapping[str, bytes],
    backend: str,
    peer_backend: str,
    refusals: Mapping[str, str],
    partial: Collection[str] = (),
) -> Choice:
    """The best transport that no probe refused; after a partial one also the next best, for the rest of the memory.

    Args:
        mine: Names of our transports, those included that are in ``refusals`` for good.
        offered: The peer's endpoints by transport name.
        backend: The transport that we force, or "auto".
        peer_backend: The transport that the peer forces, or "auto".
        refusals: Transport name -> why it is not there, or why its probe failed.
        partial: Those of ours that reach only some of a peer's memory.
    """
    reasons: list[str] = []
    names: list[str] = []
    forced = backend if backend != AUTO else peer_backend
    if backend != AUTO and peer_backend not in (AUTO, backend):
        reasons.append(f"transfer_backend is {backend!r} here and {peer_backend!r} at the peer")
    for name in candidates(mine, backend, peer_backend):
        if name in refusals:
            reasons.append(f"{name}: {refusals[name]}")
        elif name not in offered:
            reasons.append(f"{name}: {_NOT_OFFERED.get(name, 'the peer does not offer it')}")
        else:
            reasons.append(f"{name}: chosen{_why(name, forced, names, partial)}")
            names.append(name)
            if name not in partial:
                break
    return Choice(tuple(names), tuple(reasons) or (f"transfer_backend {forced!r} finds no transport here",))


def _why(name: str, forced: str, before: Sequence[str], partial: Collection[str]) -> str:
    if forced != AUTO:
        return f", forced by transfer_backend={forced!r}"
    if name in partial:
        return f" for {_REACH.get(name, 'what it reaches')}"
    return " for the rest" if before else ", first in the order of preference that works"
