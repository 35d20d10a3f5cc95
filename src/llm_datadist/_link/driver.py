"""Carries out what the table decides, and tells the table and the handler what happens. Control thread only.

Strategy: events of connections go to the table, whose actions are worked off one by one; an action whose
connection or dial has gone meanwhile is skipped. Invariants: ``prepare`` is followed by ``on_up`` or
``discard``, ``on_up`` by ``on_down``, each once; a link is found by other threads only after ``on_up`` and
until ``on_down``; Established leaves only after ``on_up`` of this side. A handler's exception costs the
connection that it was about. Only ``link_of`` and ``links`` are for other threads.
"""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from llm_datadist._core import limits
from llm_datadist._core.share import Share
from llm_datadist._link import table as t
from llm_datadist._link.connection import Connection, ends_of
from llm_datadist._link.dials import Dial, Dials
from llm_datadist._link.handshakes import Handshakes
from llm_datadist._link.hosts import Hosts
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.peer_log import PeerLog
from llm_datadist._link.seam import Address, LinkHandler, SocketCalls, Unusable
from llm_datadist._logs import get_logger
from llm_datadist._wire import messages as m
from llm_datadist._wire import session as s
from llm_datadist._wire.proofs import Ends
from llm_datadist.status import code_of

PROBE_S = 1.0  # how long an old link may take to answer before it counts as gone
PROBE_SHARE = 3  # and at most this part of the time that a dial has left

_log = get_logger("llm_datadist.link")


class LinkDriver:
    """The control thread's part of a LinkService."""

    def __init__(
        self,
        mine: m.Identity,
        retry_count: int,
        handler: LinkHandler,
        random_token: Callable[[], bytes],
        loop: ControlLoop,
        calls: SocketCalls,
    ) -> None:
        self.mine = mine
        self._calls = calls
        self._handler = handler
        self._loop = loop
        self.log = PeerLog(loop.call_at)
        self._table = t.LinkTable(mine, retry_count)
        self._conns: dict[int, Connection] = {}
        self.hosts = Hosts(loop)
        self.newcomers = Share(limits.NEWCOMERS_BURST_S, limits.NEWCOMERS_SHARE, time.monotonic())
        self._fresh: dict[int, None] = {}  # of these, accepted and without a link yet
        self._handshakes = Handshakes(handler, random_token, loop, self.log)
        self.dials = Dials(loop, self._table, self._apply, self._open_dialled, self.link_of)
        self._next_conn = 0
        self._work: deque[t.Action] = deque()
        self._working = False
        self._dirty: deque[Connection] = deque()
        self._up: dict[int, Link] = {}  # each change of it is one step, and a copy is looked at

    # ---- any thread --------------------------------------------------------------------------------

    def link_of(self, cluster_id: int) -> Link | None:
        """The link to that cluster, up or silent."""
        return self._up.get(cluster_id)  # one look-up is a thing of its own, and every transfer makes it

    def links(self) -> list[Link]:
        """All links, up or silent, by cluster id."""
        up = dict(self._up)
        return [up[cluster_id] for cluster_id in sorted(up)]

    # ---- from the service --------------------------------------------------------------------------

    def accept(self, sock: socket.socket, peer_address: str) -> float:
        """A connection came in. Returns for how long to accept no more: handshakes have had their share.

        Raises OSError: it has gone again, or cannot be watched.
        """
        if len(self._fresh) >= limits.HANDSHAKES:
            self._conns[next(iter(self._fresh))].close("too many handshakes are under way")
        conn = self._open(sock, ends_of(sock), s.Session(self.mine, time.monotonic()), peer_address)
        if not conn.closed:
            self._fresh[conn.number] = None
        return self.newcomers.rest_s(time.monotonic())

    def _open_dialled(
        self, sock: socket.socket, address: Address, ends: Ends, ticket: int, dial: Dial
    ) -> Connection:
        challenge, to = self._handshakes.new_challenge(), dial.target.cluster_id
        hello = m.Hello(version=m.PROTOCOL_VERSION, target_id=to, identity=self.mine, challenge=challenge)
        session = s.Session(self.mine, time.monotonic(), hello=hello, handshake_ends_at=dial.deadline)
        return self._open(sock, ends, session, str(address), address, ticket, challenge)

    def _open(
        self,
        sock: socket.socket,
        ends: Ends,
        session: s.Session,
        peer_address: str,
        dialled_address: Address | None = None,
        ticket: int | None = None,
        challenge: bytes = b"",
    ) -> Connection:
        self._next_conn += 1
        conn = Connection(
            self._next_conn, self._loop, sock, self._calls, session, self, self._dirty.append,
            ends=ends, peer_address=peer_address, dialled_address=dialled_address, ticket=ticket,
        )  # fmt: skip
        self._conns[conn.number] = conn
        if challenge:
            self._handshakes.dial(conn, challenge)
        try:
            conn.open()
        except OSError:  # the system cannot watch another socket: it stays its caller's
            del self._conns[conn.number]
            self._handshakes.drop(conn)
            conn.detach()
            raise
        return conn

    def drop(self, link: Link, reason: str, *, tell: bool) -> None:
        """Takes a link down."""
        for conn in list(self._conns.values()):
            if conn.link is link:
                if tell:
                    link.leave(reason)
                    conn.session.bye(reason)
                conn.close(reason)

    def stop(self, reason: str) -> None:
        """Ends all dials, links and handshakes."""
        self.dials.stop(reason)
        for conn in list(self._conns.values()):
            if conn.link is not None:
                conn.link.leave(reason)
                conn.session.bye(reason)
            conn.close(reason)

    def flush_posted(self) -> None:
        """Writes what was posted without a flush; once per turn of the loop."""
        for _ in range(len(self._dirty)):
            self._dirty.popleft().flush_posted()

    def forgive(self, seconds: float) -> None:
        """The loop was held up: peers get that time to be heard."""
        for conn in self._conns.values():
            conn.session.forgive(seconds)

    def close_after_fork(self) -> None:
        """In a forked child: closes descriptors, nothing else."""
        for conn in list(self._conns.values()):
            conn.close_after_fork()
        self.dials.close_after_fork()

    # ---- what connections report ---------------------------------------------------------------------

    def on_event(self, conn: Connection, event: s.Event) -> None:
        """See ``seam.ConnectionOwner``."""
        match event:
            case s.MessageIn(frame) if conn.link is not None:
                self._handler.on_message(conn.link, frame)
            case s.AnswerIn(message_id, frame) if conn.link is not None:
                if not conn.link.answer(message_id, frame) and not isinstance(frame.message, m.Pong):
                    self._handler.on_message(conn.link, frame)
            case s.LivenessIn(silent) if conn.link is not None:
                conn.link.set_silent(silent)
            case _:
                began = time.monotonic()
                self._on_handshake(conn, event)
                self.newcomers.spend(time.monotonic() - began if conn.ticket is None else 0.0)

    def _on_handshake(self, conn: Connection, event: s.Event) -> None:
        match event:
            case s.HelloIn(hello):
                self._handshakes.answer(conn, hello)
                self._apply(
                    self._table.hello(conn.number, hello, from_here=self._is_from_here(conn, hello.identity))
                )
            case s.DataIn(hello, leftover):
                self._hand_over(conn, hello, leftover)
            case s.WelcomeIn(welcome):
                self._on_welcome(conn, welcome)
            case s.ConfirmIn(confirm):
                self._commit(conn, lambda: self._on_confirm(conn, confirm))
            case s.EstablishedIn(established) if conn.ticket is not None and conn.session.peer is not None:
                ticket, peer = conn.ticket, conn.session.peer
                self._handshakes.established(conn, established)
                self._commit(conn, lambda: self._table.established(ticket, conn.number, peer))
            case s.RefusedIn(refused):
                self._on_refused(conn, refused)

    def _commit(self, conn: Connection, decide: Callable[[], Sequence[t.Action]]) -> None:
        if conn.peer_has_closed():  # it has given up since: its next attempt must find no trace of this one
            conn.close("the peer gave up the handshake")
        else:
            self._apply(decide())

    def _hand_over(self, conn: Connection, hello: m.DataHello, leftover: bytes) -> None:
        del self._conns[conn.number]
        self._fresh.pop(conn.number, None)
        sock = conn.detach()
        try:
            self._handler.on_data_socket(sock, hello, leftover)
        except Exception:
            sock.close()
            text = "a data connection from %s could not be taken over"
            self.log.say(logging.ERROR, conn.peer_address, text, conn.peer_address, exc_info=True)

    def _on_welcome(self, conn: Connection, welcome: m.Welcome) -> None:
        ticket = conn.ticket
        if ticket is None:
            return
        wrong = self._table.check_welcome(
            ticket, welcome.identity, from_here=self._is_from_here(conn, welcome.identity)
        )
        if wrong is None:
            result = self._handshakes.welcomed(conn, welcome)
            if not isinstance(result, Unusable):
                self._apply(self._table.welcomed(ticket, conn.number))
                return
            wrong = code_of(result.code), result.text
        self._refuse(conn, t.Refuse(conn.number, *wrong))
        self._apply(self._table.refused(ticket, *wrong, ""))

    def _on_confirm(self, conn: Connection, confirm: m.Confirm) -> Sequence[t.Action]:
        result = self._handshakes.confirmed(conn, confirm)
        if isinstance(result, Unusable):
            return [t.Refuse(conn.number, code_of(result.code), result.text)]
        return self._table.confirmed(conn.number)

    def _is_from_here(self, conn: Connection, said: m.Identity) -> bool:
        """Whether the other end of a connection, which says so, is one of ours as well."""
        ends = conn.ends.mirrored()
        return said.instance == self.mine.instance and any(c.ends == ends for c in self._conns.values())

    def _on_refused(self, conn: Connection, refused: m.Refused) -> None:
        text = refused.text[: limits.LINE_CHARS]
        ticket, conn.ticket = conn.ticket, None
        if ticket is None and refused.kind != t.ALREADY:
            self.log.refused("the peer at %s gave up the handshake: %s", conn.peer_address, text)
        conn.close(f"refused: {text}")
        if ticket is not None:
            self._apply(self._table.refused(ticket, code_of(refused.code), text, refused.kind))

    def on_closed(
        self, conn: Connection, reason: str, *, error: bool, cause: BaseException | None = None
    ) -> None:
        """See ``seam.ConnectionOwner``."""
        self._conns.pop(conn.number, None)
        self._fresh.pop(conn.number, None)
        self._handshakes.drop(conn)
        if error and (conn.ticket is None or conn.link is not None):  # else the dial's failure says it
            text = "closed the connection of %s: it broke the protocol: %s"
            self.log.say(logging.WARNING, conn.peer_address, text, conn.peer_address, reason)
        self._table.closed(conn.number)
        if conn.link is not None:
            conn.link.peer_left = conn.session.peer_left
            self._take_down(conn.link, reason, cause)
        if conn.link is None and conn.ticket is not None:
            self.dials.failed(conn.ticket, f"{conn.peer_address}: {reason}")

    def on_bug(self, conn: Connection) -> None:
        """See ``seam.ConnectionOwner``."""
        text = "an event of the connection with %s could not be handled"
        self.log.say(logging.ERROR, conn.peer_address, text, conn.peer_address, exc_info=True)

    def waiting_nbytes(self, of: Callable[[Connection], int]) -> int:
        """See ``seam.ConnectionOwner``."""
        return sum(map(of, list(self._conns.values())))

    def _take_down(self, link: Link, reason: str, cause: BaseException | None) -> None:
        if self._up.get(link.cluster_id) is link:
            del self._up[link.cluster_id]
        if link.set_down(reason, cause):
            text = "link to cluster %d at %s is down: %s"
            self.log.say(logging.INFO, link.address, text, link.cluster_id, link.address, reason)
            self._guard("on_down", functools.partial(self._handler.on_down, link, reason))

    # ---- actions of the table ------------------------------------------------------------------------

    def _apply(self, actions: Sequence[t.Action]) -> None:
        self._work.extend(actions)
        if self._working:
            return
        self._working = True
        try:
            while self._work:
                self._carry_out(self._work.popleft())
        finally:
            self._working = False

    def _carry_out(self, action: t.Action) -> None:
        match action:
            case t.Connect() | t.Retry() | t.Abandon() | t.Finish():
                self.dials.carry_out(action)
            case t.Probe():
                self._probe(action)
            case _:
                conn = self._conns.get(action.conn)
                if conn is not None:
                    self._carry_out_on(conn, action)

    def _carry_out_on(
        self, conn: Connection, action: t.Accept | t.Confirm | t.Establish | t.Refuse | t.Drop
    ) -> None:
        match action:
            case t.Accept():
                self._handshakes.welcome(conn)
                conn.say()
            case t.Confirm():
                self._handshakes.confirm(conn)
                conn.say()
            case t.Establish(_, hidden):
                self._establish(conn, hidden)
            case t.Refuse():
                self._refuse(conn, action)
            case t.Drop(_, reason):
                conn.close(reason)

    def _probe(self, action: t.Probe) -> None:
        now = time.monotonic()
        limit_s = PROBE_S
        if action.ticket is not None:
            limit_s = min(limit_s, (self.dials.deadline_of(action.ticket) - now) / PROBE_SHARE)
        conn = self._conns.get(action.conn)
        try:
            if conn is None or conn.link is None:
                raise LinkLost("gone")
            pending = conn.link.call(m.Ping(id=conn.link.next_id()))
        except LinkLost:
            self._apply(self._table.probe_done(action.probe, False))
            return
        self._loop.call_at(now + limit_s, pending.give_up)
        pending.add_done_callback(
            lambda ended: self._apply(self._table.probe_done(action.probe, ended.answered))
        )

    def _establish(self, conn: Connection, hidden: bool) -> None:
        shake, peer = self._handshakes.take(conn), conn.session.peer
        self._fresh.pop(conn.number, None)
        if peer is None or shake.prepared is None or shake.wanted is None:
            return
        if conn.dialled_address is None:
            conn.session.establish(time.monotonic(), shake.prepared.reads_by)
        conn.cork()
        link = conn.link = Link(
            conn,
            peer,
            shake.secret,
            address=conn.peer_address,
            dialled_address=conn.dialled_address,
            is_self=peer.instance == self.mine.instance,
            reads_by=shake.prepared.reads_by,
            peer_reads_by=shake.peer_reads_by,
            context=shake.prepared.context,
            since=time.time(),
        )
        if not self._guard("on_up", functools.partial(self._handler.on_up, link)):
            conn.close("an internal error of this side")
            return
        if not hidden and not conn.closed:
            self._up[link.cluster_id] = link
            self.dials.errors.pop(link.cluster_id, None)
            told = f", which listens at {peer.listens_at[:300]!r}," if peer.listens_at else ""
            text = "link to cluster %d at %s%s is up"
            self.log.say(logging.INFO, link.address, text, link.cluster_id, link.address, told)
        shake.wanted.link_is_up(link)
        conn.uncork()

    def _refuse(self, conn: Connection, refusal: t.Refuse) -> None:
        if conn.ticket is None and refusal.kind != t.ALREADY:
            self.log.refused("refused the link that %s asked for: %s", conn.peer_address, refusal.text)
        conn.ticket = None
        conn.session.refuse(refusal.code, refusal.text, refusal.kind)
        conn.close(f"refused: {refusal.text}")

    def _guard(self, what: str, fn: Callable[[], None]) -> bool:
        try:
            fn()
        except Exception:
            _log.exception("%s of the engine failed", what)
            return False
        return True
