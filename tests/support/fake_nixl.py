"""NIXL agents that live in one process and copy with memmove: its rules, and what can go wrong with it."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.transports._nixl import NixlLost, NixlRefused
from llm_datadist.transports.nixl_metadata import _KINDS, _Fields

Row = tuple[int, int, int]  # start, end, key
_KINDS_BY_NUMBER = {number: kind for kind, number in _KINDS.items()}


@dataclass
class World:
    """Agents that can reach each other.

    Attributes:
        held: Transfers do not end while this is set.
        unreachable: Names of agents that nobody can connect to.
        before_end: Called when a transfer is looked at.
        losses: How often a transfer failed.
        at_once: Transfers may end when they are posted.
        interrupted: Readers are, so that a transfer may be made and nobody know of it.
    """

    held: threading.Event = field(default_factory=threading.Event)
    unreachable: set[str] = field(default_factory=set)
    living: dict[str, FakeAgent] = field(default_factory=dict)
    made: list[FakeAgent] = field(default_factory=list)
    keys: Any = field(default_factory=itertools.count)
    before_end: Any = None
    losses: int = 0
    at_once: bool = False
    interrupted: bool = False

    def agents(self, name: str, serving: bool, within_host: bool) -> FakeAgent:
        agent = FakeAgent(self, name, serving, within_host)
        self.living[name] = agent
        self.made.append(agent)
        return agent

    def readers(self) -> list[FakeAgent]:
        """Those that live."""
        return [agent for agent in self.living.values() if not agent.serving]


class FakeAgent:
    """See ``_nixl.Agent``."""

    def __init__(self, world: World, name: str, serving: bool, within_host: bool) -> None:
        self.name = name
        self.within_host = within_host
        self.serving = serving
        self.here: list[tuple[str, Row]] = []
        self.there: list[tuple[str, Row]] = []
        self.peers: set[str] = set()
        self.loads = 0
        self._world = world
        self._transfers: dict[int, tuple[str, list[tuple[int, int, int, int]]]] = {}
        self._under_way: set[int] = set()

    def register(self, memory: str, rows: U64) -> None:
        self._alive()
        self.here += [(memory, (start, end, next(self._world.keys))) for start, end in rows.tolist()]

    def deregister(self, memory: str, rows: U64) -> None:
        self._alive()
        for start, end in rows.tolist():
            at = next((i for i, (m, r) in enumerate(self.here) if (m, *r[:2]) == (memory, start, end)), None)
            if at is None:
                raise NixlRefused("NIXL_ERR_NOT_FOUND")
            del self.here[at]

    def metadata(self, memory: str, rows: U64, connection: bool) -> bytes:
        keys = []
        for start, end in rows.tolist():
            keys.append(next(r[2] for m, r in self.here if (m, *r[:2]) == (memory, start, end)))
        return written(self.name, memory, rows.tolist(), keys, connection)

    def load(self, metadata: bytes) -> None:
        self._alive()
        name, connection, memory, rows = _read(metadata)
        if connection:
            if name in self._world.unreachable:
                raise NixlRefused("NIXL_ERR_BACKEND")
            self.peers.add(name)
        if name not in self.peers:
            raise NixlRefused("NIXL_ERR_NOT_FOUND")
        self.loads += 1
        self.there += [(memory, row) for row in rows]

    def make(self, peer: str, there: tuple[str, U64], here: tuple[str, U64], nbytes: U64) -> int:
        self._alive()
        copies = []
        for source, destination, size in zip(
            there[1].tolist(), here[1].tolist(), nbytes.tolist(), strict=True
        ):
            try:
                row = _row(self.there, there[0], source, size)
                _row(self.here, here[0], destination, size)
            except NixlRefused:
                self._world.losses += 1
                raise
            copies.append((destination, source, size, row[2]))
        number = next(self._world.keys)
        self._transfers[number] = peer, copies
        return number

    def post(self, transfer: int) -> bool:
        self._alive()
        assert transfer not in self._under_way, "posted again before it has ended"
        peer, copies = self._transfers[transfer]
        owner = self._world.living.get(peer)
        keys = {row[2] for _, row in owner.here} if owner is not None else set()
        if peer in self._world.unreachable or any(key not in keys for *_, key in copies):
            self._world.losses += 1
            raise NixlLost("NIXL_ERR_REMOTE_DISCONNECT")
        self._under_way.add(transfer)
        return self._world.at_once and self.ended(transfer)

    def ended(self, transfer: int) -> bool:
        self._alive()
        if self._world.before_end is not None:
            self._world.before_end()
        if self._world.held.is_set():
            return False
        for destination, source, size, _ in self._transfers[transfer][1]:
            ctypes.memmove(destination, source, size)
        self._under_way.discard(transfer)
        return True

    def release(self, transfer: int) -> None:
        self._alive()
        assert transfer not in self._under_way, "it would go on writing"
        del self._transfers[transfer]

    def close(self, ended: list[int]) -> None:
        while ended:
            self.release(ended.pop())
        assert self._world.interrupted or set(self._transfers) <= self._under_way, (
            "a transfer that has ended was not freed"
        )
        self._world.living.pop(self.name, None)

    def _alive(self) -> None:
        assert self._world.living.get(self.name) is self, "a destroyed agent is used"


def _row(rows: list[tuple[str, Row]], memory: str, start: int, nbytes: int) -> Row:
    """NIXL's rule: the last row that starts at or before it must hold it.

    Of those that start together NIXL may take any: here the worst, the shortest and oldest.
    """
    before = sorted((r for m, r in rows if m == memory and r[0] <= start), key=lambda r: (r[0], -r[1], -r[2]))
    if not before or before[-1][1] < start + nbytes:
        raise NixlRefused("NIXL_ERR_NOT_FOUND")
    return before[-1]


def buffer(nbytes: int, fill: int = 0) -> tuple[Any, int]:
    """An array and its address."""
    array = np.full(nbytes, fill, dtype=np.uint8)
    return array, int(array.ctypes.data)


def written(
    name: str, memory: str, rows: Sequence[Sequence[int]], keys: Sequence[int], connection: bool
) -> bytes:
    """Metadata in NIXL's form; a key is 8 bytes."""
    kind, _, device = memory.partition(":")
    fields = [(b"Agent", name.encode()), (b"Conns", _number(connection))]
    if connection:
        fields += [(b"t", b"UCX"), (b"c", b"an address of UCX")]
    fields += [(b"", b"MemSection"), (b"nixlSecElms", _number(1)), (b"bknd", b"UCX")]
    fields += [(b"nixlDList", b"nixlSDList"), (b"t", _number(_KINDS[kind])[:4]), (b"n", _number(len(rows)))]
    for (start, end), key in zip(rows, keys, strict=True):
        fields.append((b"", b"".join(map(_number, (start, end - start, int(device or 0), key)))))
    return b"nixlSerDes|" + b"".join([tag + _number(len(what)) + what + b"|" for tag, what in fields])


def _read(metadata: bytes) -> tuple[str, bool, str, list[Row]]:
    fields = _Fields(metadata)
    name, connection = fields.take(b"Agent").decode(), any(fields.take(b"Conns"))
    for tag in (b"t", b"c") if connection else ():
        fields.take(tag)
    for tag in (b"", b"nixlSecElms", b"bknd", b"nixlDList"):
        fields.take(tag)
    kind = _KINDS_BY_NUMBER[fields.take(b"t")[0]]
    rows, memory = [], kind
    for _ in range(int.from_bytes(fields.take(b"n"), "little")):
        start, nbytes, device, key = np.frombuffer(fields.take(b""), dtype="<u8").tolist()
        memory = f"{kind}:{device}" if kind != "host" else kind
        rows.append((start, start + nbytes, key))
    return name, connection, memory, rows


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
