"""Handshakes under way: what each side shows the other, and what the engine has made of it.

Invariants: what is shown is hidden when the other side has looked, or the connection has gone; ``prepare`` is
followed by ``discard`` unless the link came up (``take``). Control thread only, but for a transport's wishes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llm_datadist._link.connection import Connection
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.peer_log import PeerLog
from llm_datadist._link.seam import LinkHandler, Prepared, Showing, Unusable
from llm_datadist._logs import get_logger
from llm_datadist._wire import messages as m
from llm_datadist._wire.proofs import proof_of, secret_of
from llm_datadist.status import LLMStatusCode

_log = get_logger("llm_datadist.link")


@dataclass(slots=True)
class Handshake:
    """One of them.

    Attributes:
        challenge: Ours.
        peers_challenge: What the peer has sent.
        seed: Of the link's secret.
        secret: Of the link to be.
        shown: The proof that we show now; empty: none.
        prepared: What the engine has made of what the peer shows.
        wanted: Connections that a transport has asked for already.
        peer_reads_by: What the peer has said.
    """

    challenge: bytes
    peers_challenge: bytes = b""
    seed: bytes = b""
    secret: bytes = b""
    shown: bytes = b""
    prepared: Prepared | None = None
    wanted: Wanted | None = None
    peer_reads_by: tuple[str, ...] = ()


class Handshakes:
    """Those of one engine, by the number of their connection.

    Args:
        handler: The engine.
        random_token: Gives 16 to 64 random bytes.
        loop: Of the control thread.
        peer_log: Where faults are told.
    """

    def __init__(
        self, handler: LinkHandler, random_token: Callable[[], bytes], loop: ControlLoop, peer_log: PeerLog
    ) -> None:
        self._handler = handler
        self._peer_log = peer_log
        self._random_token = random_token
        self._loop = loop
        self._all: dict[int, Handshake] = {}

    def new_challenge(self) -> bytes:
        """For one connection."""
        return self._random_token()

    def dial(self, conn: Connection, challenge: bytes) -> None:
        """We have dialled, and sent that challenge."""
        self._all[conn.number] = Handshake(challenge)

    def answer(self, conn: Connection, hello: m.Hello) -> None:
        """We were dialled."""
        self._all[conn.number] = Handshake(self.new_challenge(), hello.challenge, seed=self._random_token())

    def welcome(self, conn: Connection) -> None:
        """The dialled side shows how it can be read."""
        shake = self._all[conn.number]
        shake.secret = secret_of(shake.seed, shake.peers_challenge, shake.challenge)
        conn.session.welcome(shake.seed, shake.challenge, self._show(conn, shake))

    def welcomed(self, conn: Connection, welcome: m.Welcome) -> Prepared | Unusable:
        """The dialler looks."""
        shake = self._all[conn.number]
        shake.peers_challenge = welcome.challenge
        shake.secret = secret_of(welcome.seed, shake.challenge, welcome.challenge)
        return self._prepare(conn, shake, welcome.endpoints)

    def confirm(self, conn: Connection) -> None:
        """The dialler shows how it can be read."""
        shake = self._all[conn.number]
        conn.session.confirm(_reads_by(shake), self._show(conn, shake))

    def confirmed(self, conn: Connection, confirm: m.Confirm) -> Prepared | Unusable:
        """The dialled side looks."""
        shake = self._all[conn.number]
        self._hide(shake)
        shake.peer_reads_by = confirm.reads_by
        return self._prepare(conn, shake, confirm.endpoints)

    def established(self, conn: Connection, established: m.Established) -> None:
        """The dialled side has looked."""
        shake = self._all[conn.number]
        self._hide(shake)
        shake.peer_reads_by = established.reads_by

    def take(self, conn: Connection) -> Handshake:
        """The link comes up: what was prepared is its now."""
        return self._all.pop(conn.number)

    def drop(self, conn: Connection) -> None:
        """The connection has gone."""
        shake = self._all.pop(conn.number, None)
        if shake is None:
            return
        self._hide(shake)
        if shake.prepared is not None:
            try:
                self._handler.discard(shake.prepared)
            except Exception:
                _log.exception("discard of the engine failed")

    def _show(self, conn: Connection, shake: Handshake) -> dict[str, bytes]:
        shake.shown = proof_of(shake.peers_challenge, conn.ends)
        try:
            return self._handler.show(shake.shown)
        except Exception:
            text = "nothing can be shown to the peer at %s"
            self._peer_log.say(logging.ERROR, conn.peer_address, text, conn.peer_address, exc_info=True)
            return {}

    def _hide(self, shake: Handshake) -> None:
        shown, shake.shown = shake.shown, b""
        if shown:
            self._handler.hide(shown)

    def _prepare(
        self, conn: Connection, shake: Handshake, endpoints: Mapping[str, bytes]
    ) -> Prepared | Unusable:
        peer = conn.session.peer
        if peer is None:
            return Unusable(LLMStatusCode.LLM_FAILED, "no identity")
        proof = proof_of(shake.challenge, conn.ends.mirrored())
        showing = Showing(endpoints, proof, conn.ends.is_within_host)
        shake.wanted = Wanted(self._loop, conn)
        try:
            result = self._handler.prepare(
                peer, showing, shake.secret, conn.dialled_address, shake.wanted.ask
            )
        except Exception as error:
            text = "the link with cluster %d cannot be prepared"
            self._peer_log.say(logging.ERROR, conn.peer_address, text, peer.cluster_id, exc_info=True)
            return Unusable(LLMStatusCode.LLM_FAILED, f"an internal error: {type(error).__name__}")
        if isinstance(result, Prepared):
            shake.prepared = result
        return result


def _reads_by(shake: Handshake) -> tuple[str, ...]:
    return shake.prepared.reads_by if shake.prepared is not None else ()


class Wanted:
    """Passes on a transport's wish for connections; one made before the link is up waits for that."""

    def __init__(self, loop: ControlLoop, conn: Connection) -> None:
        self._loop = loop
        self._conn = conn
        self._count = 0

    def ask(self, count: int) -> None:
        """Any thread."""
        if self._conn.link is None:
            self._loop.call_soon(lambda: self._add(count))
        else:
            self._send(self._conn.link, count)

    def link_is_up(self, link: Link) -> None:
        """Control thread."""
        count, self._count = self._count, 0
        if count:
            self._send(link, count)

    def _add(self, count: int) -> None:
        self._count += count
        if self._conn.link is not None:
            self.link_is_up(self._conn.link)

    def _send(self, link: Link, count: int) -> None:
        with contextlib.suppress(LinkLost):
            link.send(m.NeedConnections(count=count))
