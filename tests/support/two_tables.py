"""Two LinkTables joined by a network whose every delivery the test chooses: all races, no time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from llm_datadist._link import table as t
from llm_datadist._wire.messages import PROTOCOL_VERSION, Hello, Identity
from llm_datadist.status import LLMStatusCode

Event = Callable[[], None]


def identity(cluster_id: int, life: int = 0, *, accessible: bool = False) -> Identity:
    return Identity(
        cluster_id=cluster_id,
        instance=cluster_id.to_bytes(8, "big") + life.to_bytes(8, "big"),
        role=1,
        accessible=accessible,
    )


class Node:
    """One side: carries out the actions of its table as the driver does."""

    def __init__(self, world: World, cluster_id: int, retry_count: int, life: int = 0) -> None:
        self.world = world
        self.me = identity(cluster_id, life)
        self.table = t.LinkTable(self.me, retry_count)
        self.link: int | None = None
        self.results: dict[int, LLMStatusCode] = {}
        self.open: set[int] = set()
        self.dial_of: dict[int, int] = {}  # connection -> ticket
        self.retries: list[int] = []
        self.probes: dict[int, int] = {}
        self.refusals = 0

    def dial(self, ticket: int, cluster_id: int) -> None:
        self.apply(self.table.dial(ticket, cluster_id))

    def apply(self, actions: Sequence[t.Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: t.Action) -> None:
        match action:
            case t.Connect(ticket):
                conn = self.world.connect(self)
                self.dial_of[conn] = ticket
            case t.Retry(ticket, _):
                self.retries.append(ticket)
            case t.Abandon(ticket):
                self.retries = [other for other in self.retries if other != ticket]
                for conn in [c for c, owner in self.dial_of.items() if owner == ticket]:
                    del self.dial_of[conn]
                    self.close(conn)
            case t.Finish(ticket, code, _):
                assert ticket not in self.results, "a dial has one result"
                self.results[ticket] = code
            case t.Probe(probe, conn, _):
                self.probes[probe] = conn
                self.world.send(self, conn, "ping", probe)
            case _:
                if action.conn in self.open:
                    self._carry_out_on(action)

    def _carry_out_on(self, action: t.Action) -> None:
        match action:
            case t.Accept(conn):
                self.world.send(self, conn, "welcome")
            case t.Confirm(conn):
                self.world.send(self, conn, "confirm")
            case t.Establish(conn, _):
                assert self.link is None, "one link at a time"
                self.link = conn
                if self.dial_of.pop(conn, None) is None:
                    self.world.send(self, conn, "established")
            case t.Refuse(conn, code, text, kind):
                self.world.send(self, conn, "refused", (code, text, kind))
                self.dial_of.pop(conn, None)
                self.close(conn)
            case t.Drop(conn, _):
                self.close(conn)

    def close(self, conn: int, *, unnoticed: bool = False) -> None:
        if conn not in self.open:
            return
        self.open.discard(conn)
        if not unnoticed:
            self.world.send(self, conn, "closed")
        if self.link == conn:
            self.link = None
        self.table.closed(conn)
        for probe in [p for p, c in self.probes.items() if c == conn]:
            self.end_probe(probe, False)
        ticket = self.dial_of.pop(conn, None)
        if ticket is not None:
            self.apply(self.table.connect_failed(ticket, "closed"))

    def end_probe(self, probe: int, answered: bool) -> None:
        if self.probes.pop(probe, None) is not None:
            self.apply(self.table.probe_done(probe, answered))

    def receive(self, conn: int, kind: str, content: object, then_closed: bool) -> None:
        if conn not in self.open:
            return
        match kind, content:
            case (("confirm" | "established"), _) if then_closed:
                self.close(conn)
            case "refused", (code, text, refusal):
                self._refused(conn, code, text, refusal)
            case "ping", _ if self.link == conn:
                self.world.send(self, conn, "pong", content)
            case "pong", int(probe):
                self.end_probe(probe, True)
            case "closed", _:
                self.close(conn)
            case _:
                self.apply(self._shake(conn, kind, content))

    def _shake(self, conn: int, kind: str, content: object) -> Sequence[t.Action]:
        match kind, content:
            case "hello", Hello() as hello:
                return self.table.hello(conn, hello)
            case "welcome", _:
                return self.table.welcomed(self.dial_of[conn], conn)
            case "confirm", _:
                return self.table.confirmed(conn)
            case "established", _:
                return self.table.established(self.dial_of[conn], conn, self.world.other(self).me)
        return []

    def _refused(self, conn: int, code: LLMStatusCode, text: str, kind: str) -> None:
        ticket = self.dial_of.pop(conn, None)
        self.close(conn)
        if ticket is not None:
            self.refusals += 1
            self.apply(self.table.refused(ticket, code, text, kind))


class World:
    """Cluster 1 (the authority) and cluster 2, and what is on its way between them.

    Args:
        retry_count: Attempts of a dial.
        sees_ends: Whether a side that reads the last message before the end of a stream sees that end.
    """

    def __init__(self, retry_count: int = 1, *, sees_ends: bool = False) -> None:
        self._sees_ends = sees_ends
        self.nodes = (Node(self, 1, retry_count), Node(self, 2, retry_count))
        self._next = 0
        self._ways: dict[tuple[int, int], deque[tuple[str, object]]] = defaultdict(deque)

    def other(self, node: Node) -> Node:
        return self.nodes[1 - self.nodes.index(node)]

    def connect(self, node: Node) -> int:
        self._next += 1
        for side in self.nodes:
            side.open.add(self._next)
        target = self.other(node).me.cluster_id
        hello = Hello(version=PROTOCOL_VERSION, target_id=target, identity=node.me, challenge=b"")
        self.send(node, self._next, "hello", hello)
        return self._next

    def send(self, node: Node, conn: int, kind: str, content: object = None) -> None:
        self._ways[conn, self.nodes.index(self.other(node))].append((kind, content))

    def events(self, *, only_true_timeouts: bool = True) -> list[Event]:
        """Everything that can happen next."""
        found: list[Event] = []
        self._ways = defaultdict(deque, {key: way for key, way in self._ways.items() if way})
        for (conn, to), way in self._ways.items():
            if way:
                found.append(lambda conn=conn, to=to, way=way: self._deliver(conn, to, way))
        for node in self.nodes:
            if node.retries:
                found.append(lambda node=node: node.apply(node.table.retry_due(node.retries.pop(0))))
            for probe, conn in node.probes.items():
                if not only_true_timeouts or conn not in self.other(node).open:
                    found.append(lambda node=node, probe=probe: node.end_probe(probe, False))
        return found

    def _deliver(self, conn: int, to: int, way: deque[tuple[str, object]]) -> None:
        kind, content = way.popleft()
        then_closed = self._sees_ends and bool(way) and way[0][0] == "closed"
        self.nodes[to].receive(conn, kind, content, then_closed)

    def settle(self, limit: int = 2000) -> None:
        """Lets everything happen, each in its turn, until nothing is left to happen."""
        for turn in range(limit):
            events = self.events()
            if not events:
                return
            events[turn % len(events)]()
        raise AssertionError("the two tables never come to rest")
