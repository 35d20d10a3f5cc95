"""Warm peer processes, used again by later tests after they gave everything back."""

from __future__ import annotations

from typing import Any

from tests.support import actors
from tests.support.peers import Peer, PeerDied, Running

_idle: list[Peer] = []


class Spawner:
    """Peers of one test. ``spawner()`` gives a warm one, ``spawner(prefix=…)`` one of its own.

    Args:
        env: What all of them have in their environment.
    """

    def __init__(self, env: dict[str, str | None] | None = None) -> None:
        self._env = dict(env or {})
        self._mine: list[Peer] = []

    def __call__(self, **how: Any) -> Peer:
        peer = None if how else self._warm()
        if peer is not None:
            self._mine.append(peer)
            return peer
        peer = Peer(**{**how, "env": {**self._env, **(how.get("env") or {})}})
        self._mine.append(peer)
        peer.call(actors.ready)
        return peer

    def _warm(self) -> Peer | None:
        for peer in [peer for peer in reversed(_idle) if peer.env == self._env]:
            _idle.remove(peer)
            if peer.alive:
                return peer
            peer.close()
        return None

    def close(self) -> list[str]:
        """Takes the peers back, all at once; what any of them did not give back."""
        leaks = []
        resets = [(peer, _start_reset(peer)) for peer in self._mine]
        for peer, reset in resets:
            left = _left(reset)
            if left == "" and peer.plain and peer.env == self._env:
                _idle.append(peer)
                continue
            peer.close()
            if left:
                leaks.append(f"peer {peer.pid}: {left}")
        self._mine.clear()
        return leaks


def _start_reset(peer: Peer) -> Running | None:
    """None when it has ended, or is stopped."""
    try:
        return peer.start(actors.reset) if peer.alive else None
    except PeerDied:
        return None


def _left(reset: Running | None) -> str | None:
    """What a peer did not give back; None when it ended meanwhile."""
    if reset is None:
        return None
    try:
        outcome = reset.outcome(20)
    except TimeoutError as exc:
        return f"giving back hangs: {exc}"
    if isinstance(outcome.error, PeerDied):
        return None
    return str(outcome.value) if outcome.error is None else repr(outcome.error)


def idle_peers() -> tuple[Peer, ...]:
    return tuple(_idle)


def close_idle() -> None:
    while _idle:
        _idle.pop().close()
