"""Which links exist and what to do next. Pure policy: events in, actions out.

One link per remote cluster. Of two clusters that dial each other the one with the smaller id is the
authority: it commits at most one connection per peer (with Confirm when it dialled, with Established when
it was dialled) and refuses any other as "already"; the other side takes what the authority commits, in
place of an older link of its own. A link that comes up, by whichever side's dial, fulfils the dial of that
cluster. An old link is replaced only when it does not answer a ping. A link to myself has its dialled end
in the table, its accepted end nowhere. Connections, probes and tickets are numbers given by the caller.
Control thread only; an action may be carried out late: what it names may be gone, and is then skipped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from llm_datadist._wire.messages import PROTOCOL_VERSION, Hello, Identity
from llm_datadist.status import LLMStatusCode

ALREADY = "already"
REDIAL_S = 0.05  # after "already": the link that is being made usually comes up within a round trip
BACKOFF_S = 0.1  # before the second attempt; doubled for each further one
BACKOFF_MAX_S = 5.0

_SUCCESS = LLMStatusCode.LLM_SUCCESS
_FAILED = LLMStatusCode.LLM_LINK_FAILED


@dataclass(frozen=True, slots=True)
class Connect:
    """Make a connection for this dial; report ``connect_failed`` or, after Welcome, ``welcomed``."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Report ``retry_due`` after the delay."""

    ticket: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give up what is under way for this dial: attempt, connection, timer."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The result of a dial."""

    ticket: int
    code: LLMStatusCode
    text: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ping the link on this connection; report ``probe_done``. ``ticket``: for a dial, else for a Hello."""

    probe: int
    conn: int
    ticket: int | None


@dataclass(frozen=True, slots=True)
class Accept:
    """Prepare, and send Welcome."""

    conn: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Send Confirm."""

    conn: int


@dataclass(frozen=True, slots=True)
class Establish:
    """The link is up (on the accepting side: send Established first). ``hidden``: see ``Link.accepted``."""

    conn: int
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send Refused and close."""

    conn: int
    code: LLMStatusCode
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Close this connection, whose link has been replaced."""

    conn: int
    reason: str


Action: TypeAlias = (
    Connect | Retry | Abandon | Finish | Probe | Accept | Confirm | Establish | Refuse | Drop
)  # fmt: skip


@dataclass(slots=True)
class _Dial:
    ticket: int
    cluster_id: int
    attempts: int = 0
    conn: int | None = None  # Welcome has come on it
    confirmed: bool = False  # and Confirm was sent
    replaces: int | None = None  # a link that did not answer


@dataclass(slots=True)
class _Accepted:
    cluster_id: int
    instance: bytes
    hidden: bool = False
    replaces: int | None = None


@dataclass(slots=True)
class _Peer:
    link: int | None = None
    instance: bytes = b""
    dialled: bool = False
    dial: _Dial | None = None
    waiting: deque[_Dial] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return self.link is None and self.dial is None and not self.waiting


class LinkTable:
    """The links and dials of one engine."""

    def __init__(self, mine: Identity, retry_count: int) -> None:
        self._mine = mine
        self._retry_count = retry_count
        self._peers: dict[int, _Peer] = {}
        self._dials: dict[int, _Dial] = {}
        self._accepted: dict[int, _Accepted] = {}
        self._probes: dict[int, tuple[int, int | None, int | None]] = {}  # -> link probed, ticket, conn
        self._next_probe = 0

    # ---- dialling ----------------------------------------------------------------------------------

    def dial(self, ticket: int, cluster_id: int) -> list[Action]:
        """A dial begins, or waits for the one to the same cluster that is under way."""
        dial = self._dials[ticket] = _Dial(ticket, cluster_id)
        peer = self._peers.setdefault(cluster_id, _Peer())
        if peer.dial is not None:
            peer.waiting.append(dial)
            return []
        peer.dial = dial
        return self._begin(dial, peer)

    def _begin(self, dial: _Dial, peer: _Peer) -> list[Action]:
        dial.conn, dial.confirmed = None, False
        if peer.link is None:
            return [Connect(dial.ticket)]
        return [self._probe(peer.link, dial.ticket, None)]

    def connect_failed(self, ticket: int, text: str) -> list[Action]:
        """An attempt ended without an answer of the peer: no connection, or one that was lost."""
        dial = self._dials.get(ticket)
        if dial is None:
            return []
        dial.conn, dial.confirmed = None, False
        dial.attempts += 1
        if dial.attempts < self._retry_count:
            return [Retry(ticket, min(BACKOFF_S * 2 ** (dial.attempts - 1), BACKOFF_MAX_S))]
        return self._finish(dial, _FAILED, text)

    def retry_due(self, ticket: int) -> list[Action]:
        """The delay of a Retry has passed."""
        dial = self._dials.get(ticket)
        return [] if dial is None else self._begin(dial, self._peers[dial.cluster_id])

    def check_welcome(
        self, ticket: int, peer: Identity, *, from_here: bool = False
    ) -> tuple[LLMStatusCode, str] | None:
        """Why the cluster that answered is not the one that was dialled; None if it is.

        ``from_here``: the other end of the connection is one of ours.
        """
        dial = self._dials.get(ticket)
        if dial is None:
            return _FAILED, "the dial was given up"
        if peer.cluster_id != dial.cluster_id:
            return _FAILED, f"cluster {dial.cluster_id} was dialled but cluster {peer.cluster_id} answers"
        return self._mismatch(peer, from_here)

    def welcomed(self, ticket: int, conn: int) -> list[Action]:
        """The dialler has checked and prepared everything: its commit point.

        No other link can be up here: it would have fulfilled this dial.
        """
        dial = self._dials.get(ticket)
        if dial is None:
            return [Refuse(conn, _FAILED, "the dial was given up")]
        dial.conn, dial.confirmed = conn, True
        return [Confirm(conn)]

    def refused(self, ticket: int, code: LLMStatusCode, text: str, kind: str) -> list[Action]:
        """The peer refused, or we refused it. "already": the link that there is, or will be, serves us."""
        dial = self._dials.get(ticket)
        if dial is None:
            return []
        dial.conn, dial.confirmed = None, False
        if kind == ALREADY:
            return [Retry(ticket, REDIAL_S)]
        return self._finish(dial, code, text)

    def established(self, ticket: int, conn: int, peer_id: Identity) -> list[Action]:
        """The peer counts the link as up."""
        dial = self._dials.get(ticket)
        if dial is None:
            return [Drop(conn, "the dial was given up")]
        peer = self._peers[dial.cluster_id]
        return self._come_up(peer, conn, peer_id.instance, [Establish(conn)])

    def expired(self, ticket: int, code: LLMStatusCode, text: str) -> list[Action]:
        """The time of a dial is over, or the caller wants no more of it."""
        dial = self._dials.get(ticket)
        if dial is None:
            return []
        peer = self._peers[dial.cluster_id]
        if peer.dial is dial:
            return [Abandon(ticket), *self._finish(dial, code, text)]
        peer.waiting.remove(dial)
        del self._dials[ticket]
        return [Finish(ticket, code, text)]

    def _finish(self, dial: _Dial, code: LLMStatusCode, text: str) -> list[Action]:
        peer = self._peers[dial.cluster_id]
        del self._dials[dial.ticket]
        peer.dial = None
        actions: list[Action] = [Finish(dial.ticket, code, text)]
        if code in (_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK):
            peer.dialled = True
            while peer.waiting:
                later = peer.waiting.popleft()
                del self._dials[later.ticket]
                actions.append(Finish(later.ticket, LLMStatusCode.LLM_ALREADY_LINK, ""))
        elif peer.waiting:
            peer.dial = peer.waiting.popleft()
            actions += self._begin(peer.dial, peer)
        self._tidy(dial.cluster_id)
        return actions

    # ---- being dialled -------------------------------------------------------------------------------

    def hello(self, conn: int, hello: Hello, *, from_here: bool = False) -> list[Action]:
        """A peer dials us. ``from_here`` as in ``check_welcome``."""
        peer_id = hello.identity
        wrong = self._check_hello(hello, from_here)
        if wrong is not None:
            return [Refuse(conn, *wrong)]
        is_self = peer_id.cluster_id == self._mine.cluster_id
        self._accepted[conn] = _Accepted(peer_id.cluster_id, peer_id.instance, hidden=is_self)
        peer = self._peers.get(peer_id.cluster_id)
        if is_self or peer is None or peer.link is None:
            return [Accept(conn)]
        return [self._probe(peer.link, None, conn)]

    def _check_hello(self, hello: Hello, from_here: bool) -> tuple[LLMStatusCode, str] | None:
        if hello.version != PROTOCOL_VERSION:
            return _FAILED, f"the dialler speaks protocol {hello.version}, this side {PROTOCOL_VERSION}"
        if hello.target_id != self._mine.cluster_id:
            return _FAILED, (
                f"cluster {hello.target_id} was dialled but this is cluster {self._mine.cluster_id}: "
                "check the remote cluster id and its address"
            )
        return self._mismatch(hello.identity, from_here)

    def _mismatch(self, peer: Identity, from_here: bool) -> tuple[LLMStatusCode, str] | None:
        mine = self._mine
        if peer.cluster_id == mine.cluster_id and peer.instance != mine.instance:
            return _FAILED, f"two processes have cluster id {peer.cluster_id}: cluster ids must be unique"
        if peer.instance == mine.instance and not (from_here and peer.cluster_id == mine.cluster_id):
            return _FAILED, (
                f"the peer says that it is this very process, cluster {mine.cluster_id}, but the other end of its "
                "connection is not here"
            )
        if peer.accessible != self._mine.accessible:
            return LLMStatusCode.LLM_PARAM_INVALID, (
                "enable_remote_cache_accessible must be equal on both sides: "
                f"cluster {self._mine.cluster_id} has {int(self._mine.accessible)}, "
                f"cluster {peer.cluster_id} has {int(peer.accessible)}"
            )
        return None

    def confirmed(self, conn: int) -> list[Action]:
        """The dialler has prepared as well: the acceptor's commit point."""
        accepted = self._accepted.pop(conn, None)
        if accepted is None:
            return [Drop(conn, "unknown to the table")]
        if accepted.hidden:
            return [Establish(conn, hidden=True)]
        peer = self._peers.setdefault(accepted.cluster_id, _Peer())
        if self._is_authority(accepted.cluster_id):
            committed = peer.dial is not None and peer.dial.confirmed
            if committed or peer.link not in (None, accepted.replaces):
                self._tidy(accepted.cluster_id)
                return [Refuse(conn, _FAILED, "another connection of these two clusters was first", ALREADY)]
        return self._come_up(peer, conn, accepted.instance, [Establish(conn)])

    # ---- both ----------------------------------------------------------------------------------------

    def probe_done(self, probe: int, answered: bool) -> list[Action]:
        """The end of a Probe."""
        link, ticket, conn = self._probes.pop(probe, (0, None, None))
        if ticket is not None:
            return self._dial_probed(ticket, link, answered)
        accepted = None if conn is None else self._accepted.get(conn)
        if accepted is None or conn is None:
            return []
        return self._hello_probed(conn, accepted, link, answered)

    def _dial_probed(self, ticket: int, link: int, answered: bool) -> list[Action]:
        dial = self._dials.get(ticket)
        if dial is None:
            return []
        peer = self._peers[dial.cluster_id]
        if peer.link != link:
            return self._begin(dial, peer)
        if not answered:
            dial.replaces = link
            return [Connect(ticket)]
        return self._finish(dial, LLMStatusCode.LLM_ALREADY_LINK if peer.dialled else _SUCCESS, "")

    def _hello_probed(self, conn: int, accepted: _Accepted, link: int, answered: bool) -> list[Action]:
        peer = self._peers.get(accepted.cluster_id)
        if peer is None or peer.link is None:
            return [Accept(conn)]
        if peer.link == link and not answered:
            accepted.replaces = link
            return [Accept(conn)]
        del self._accepted[conn]
        if accepted.instance == peer.instance:
            return [Refuse(conn, _FAILED, "these two clusters are linked", ALREADY)]
        text = f"another live process holds cluster id {accepted.cluster_id}: cluster ids must be unique"
        return [Refuse(conn, _FAILED, text)]

    def closed(self, conn: int) -> None:
        """A link, or a connection that was accepted, is gone; of a dial, see ``connect_failed``."""
        self._accepted.pop(conn, None)
        for cluster_id, peer in self._peers.items():
            if peer.link == conn:
                peer.link, peer.dialled = None, False
                self._tidy(cluster_id)
                return

    def _come_up(self, peer: _Peer, conn: int, instance: bytes, actions: list[Action]) -> list[Action]:
        before: list[Action] = []
        if peer.link is not None:
            before.append(Drop(peer.link, "replaced: the peer has made a new link"))
        peer.link, peer.instance, peer.dialled = conn, instance, False
        dial = peer.dial
        if dial is not None:
            if dial.conn != conn:
                actions.append(Abandon(dial.ticket))
            actions += self._finish(dial, _SUCCESS, "")
        return before + actions

    def _is_authority(self, cluster_id: int) -> bool:
        return self._mine.cluster_id < cluster_id

    def _probe(self, link: int, ticket: int | None, conn: int | None) -> Probe:
        self._next_probe += 1
        self._probes[self._next_probe] = (link, ticket, conn)
        return Probe(self._next_probe, link, ticket)

    def _tidy(self, cluster_id: int) -> None:
        if self._peers[cluster_id].idle:
            del self._peers[cluster_id]
