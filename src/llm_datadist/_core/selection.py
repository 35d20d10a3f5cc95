"""Which transport reads a peer, and why: a pure function of both sides' offers and the probes' answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AUTO = "auto"
PREFERENCE = ("shm", "local", "nixl", "tcp")  # same-host memory first, then engines, then plain sockets


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport chosen ("" = none) and one line for and against each that was looked at."""

    name: str
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
) -> Choice:
    """The best transport that no probe refused.

    Args:
        mine: Names of our transports.
        offered: The peer's endpoints by transport name.
        backend: The transport that we force, or "auto".
        peer_backend: The transport that the peer forces, or "auto".
        refusals: Transport name -> why its probe failed.
    """
    reasons: list[str] = []
    if backend != AUTO and peer_backend not in (AUTO, backend):
        reasons.append(f"transfer_backend is {backend!r} here and {peer_backend!r} at the peer")
    for name in candidates(mine, backend, peer_backend):
        if name not in offered:
            reasons.append(f"{name}: the peer does not offer it")
        elif name in refusals:
            reasons.append(f"{name}: {refusals[name]}")
        else:
            forced = backend if backend != AUTO else peer_backend
            why = (
                f"forced by transfer_backend={forced!r}"
                if forced != AUTO
                else "first in the order of preference that works"
            )
            return Choice(name, (*reasons, f"{name}: chosen, {why}"))
    wanted = backend if backend != AUTO else peer_backend
    return Choice("", tuple(reasons) or (f"transfer_backend {wanted!r} finds no transport here",))
