"""Warm peer processes, used again by later tests after they gave everything back."""

from __future__ import annotations

from typing import Any

from tests.support import actors
from tests.support.peers import Peer, PeerDied

_idle: list[Peer] = []


class Spawner:
    """Peers of one test. ``spawner()`` gives a warm one, ``spawner(prefix=…)`` one of its own."""

    def __init__(self) -> None:
        self._mine: list[Peer] = []

    def __call__(self, **how: Any) -> Peer:
        while not how and _idle:
            peer = _idle.pop()
            if peer.alive:
                self._mine.append(peer)
                return peer
            peer.close()
        peer = Peer(**how)
        self._mine.append(peer)
        peer.call(actors.ready)
        return peer

    def close(self) -> list[str]:
        """Takes the peers back; what any of them did not give back."""
        leaks = []
        for peer in self._mine:
            if not peer.alive:
                peer.close()
                continue
            left = _reset(peer)
            if left == "" and peer.plain:
                _idle.append(peer)
                continue
            peer.close()
            if left:
                leaks.append(f"peer {peer.pid}: {left}")
        self._mine.clear()
        return leaks


def _reset(peer: Peer) -> str | None:
    """What the peer did not give back; None when it ended meanwhile."""
    try:
        outcome = peer.attempt(actors.reset, timeout=20)
    except TimeoutError as exc:
        return f"giving back hangs: {exc}"
    except PeerDied:
        return None
    if isinstance(outcome.error, PeerDied):
        return None
    return str(outcome.value) if outcome.error is None else repr(outcome.error)


def idle_peers() -> tuple[Peer, ...]:
    return tuple(_idle)


def close_idle() -> None:
    while _idle:
        _idle.pop().close()
