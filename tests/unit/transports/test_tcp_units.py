"""Units over TCP: one block of each tensor, again and again, with less ado than a plain read."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stream_owner import ExtentsServing, ExtentsSource
from llm_datadist.transports import tcp_serving
from llm_datadist.transports._sockets import NOW_NBYTES, Iovecs
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_channel import MAX_UNIT_TENSORS
from llm_datadist.transports.tcp_frames import (
    HEADER_NBYTES,
    EndKind,
    UnitRequests,
    encode_data,
    encode_end,
    encode_request,
    middle_of,
    unit_of,
)
from tests.support.tcp_rig import CALL_S, U8, Rig, Trickle, extents_of, memory_of
from tests.support.world import wait_until

HEAD = b"the blocks, number "
TENSORS, BLOCKS, SIZE = 2, 8, 300
NBYTES = TENSORS * SIZE
STALE = Fault(FaultKind.REFUSED, "stale", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


class Blocks(ExtentsSource):
    """Blocks of some tensors; a selector is a head of the tests and the number of one.

    Attributes:
        plain: Selectors that were asked for in full.
        short: Units that were asked for shortly.
        stands: Whether units are what they were.
    """

    def __init__(self, memory: U8, size: int = SIZE) -> None:
        super().__init__()
        self.memory, self.size = memory, size
        self.plain: list[bytes] = []
        self.short: list[int] = []
        self.stands = True

    def block(self, unit: int) -> Extents:
        return extents_of(self.memory, [unit], self.size)

    def open(self, link_token: bytes, selector: bytes) -> ExtentsServing | Fault:  # type: ignore[override]
        self.plain.append(selector)
        if self.refusal is not None:
            return self.refusal
        self.open_count += 1
        return ExtentsServing(self, self.block(int.from_bytes(selector[-4:], "little")))

    def units(self, link_token: bytes, selector: bytes) -> Any:
        return _Units(self)


class _Units:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def send_now(self, unit: int, send: Callable[[Extents], None]) -> bool:
        if self._blocks.stands:
            self._blocks.short.append(unit)
            send(self._blocks.block(unit))
        return self._blocks.stands


class UnitRig(Rig):
    """A rig whose owner has blocks, and a reader of them that has a connection."""

    def __init__(self, tensors: int = TENSORS, size: int = SIZE, heads: tuple[bytes, ...] = (HEAD,)) -> None:
        super().__init__()
        self.there, self.here = memory_of(tensors, BLOCKS * size, 1), memory_of(tensors, BLOCKS * size, None)
        self.size = size
        self.blocks = Blocks(self.there, size)
        self.owner._server._source = self.source = self.blocks
        self.units = [self._units(head) for head in heads]
        self.plain()

    def _units(self, head: bytes) -> Any:
        bases = np.array([row.ctypes.data for row in self.here], np.uint64)
        return self.channel.units(head, bases, self.size)

    def plain(self, unit: int = 0) -> Any:
        """A plain read of a block to block 0."""
        plan = Segments(HEAD + unit.to_bytes(4, "little"), extents_of(self.here, [0], self.size))
        return self.channel.read(plan).wait(deadline=time.monotonic() + CALL_S)

    def pull(self, unit: int, to: int, of: int = 0, timeout_s: float = CALL_S) -> bool:
        """A read of a block; nothing else may have changed."""
        self.here[:] = 0xA5
        deadline, cuts = time.monotonic() + timeout_s, list[Any]()
        done: bool = self.units[of].read(unit, to * self.size, deadline=deadline, on_cut=cuts.append)
        assert not cuts or (len(cuts) == 2 and cuts[1] is None)
        expected = np.full_like(self.here, 0xA5)
        if done:
            columns = [slice(at * self.size, (at + 1) * self.size) for at in (unit, to)]
            expected[:, columns[1]] = self.there[:, columns[0]]
            assert np.array_equal(self.here, expected)
        return done

    @property
    def sockets(self) -> list[socket.socket]:
        return self.channel.pool.sockets()


@pytest.fixture
def rig() -> Iterator[UnitRig]:
    rig = UnitRig()
    yield rig
    rig.close()


# ---- right bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "size"), [(1, 1), (1, NOW_NBYTES), (2, 300), (60, 1001), (MAX_UNIT_TENSORS, 64)]
)
def test_b7_any_unit_of_any_number_of_tensors(tensors: int, size: int) -> None:
    rig = UnitRig(tensors, size)
    rng = np.random.default_rng(2)
    for unit, to in rng.integers(0, BLOCKS, (30, 2)).tolist():
        assert rig.pull(unit, to)
    assert len(rig.sockets) == 1
    assert rig.channel.bytes_in == rig.owner_channel.bytes_out == 31 * tensors * size
    rig.close()


def test_the_owner_is_asked_in_full_once(rig: UnitRig) -> None:
    for unit in range(BLOCKS):
        assert rig.pull(unit, 0)
    assert (len(rig.blocks.plain), rig.blocks.short) == (1, list(range(BLOCKS)))
    assert rig.blocks.open_count == 0


def test_each_kind_of_request_is_known_by_itself() -> None:
    """Two readers of two caches share a connection."""
    rig = UnitRig(heads=(HEAD, b"others"))
    for unit in range(BLOCKS):
        assert rig.pull(unit, 1, of=unit % 2)
    assert len(rig.blocks.plain) == 2
    rig.close()


def test_an_owner_knows_so_many_and_no_more(rig: UnitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_serving, "_MAX_KNOWN", 2)
    rig.units = [rig._units(bytes([65 + i]) * 9) for i in range(3)]
    for _ in range(2):
        for i in range(3):
            assert rig.pull(i, i, of=i)
    (connection,) = rig.owner._server._connections.values()
    assert len(connection._known) <= 2


def test_threads_share_what_was_prepared(rig: UnitRig) -> None:
    """Each gets its own block, all at once."""
    start, done = threading.Barrier(4), [0] * 4

    def work(unit: int) -> None:
        start.wait(CALL_S)
        plan = Segments(HEAD + unit.to_bytes(4, "little"), extents_of(rig.here, [unit], SIZE))
        for _ in range(100):
            by = time.monotonic() + CALL_S
            assert rig.channel.read(plan).wait(deadline=by).fault is None  # which dials, if need be
            done[unit] += rig.units[0].read(unit, unit * SIZE, deadline=by, on_cut=lambda _: None)

    threads = [threading.Thread(target=work, args=(unit,)) for unit in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(done) > 0
    columns = slice(0, 4 * SIZE)
    assert np.array_equal(rig.here[:, columns], rig.there[:, columns])


# ---- left to the plain way --------------------------------------------------------------------------


def test_without_an_idle_connection_nothing_is_asked() -> None:
    rig = UnitRig()
    for sock in rig.sockets:
        sock.shutdown(socket.SHUT_RDWR)
    assert not rig.pull(1, 1), "a dead connection"
    assert not rig.sockets
    assert not rig.pull(1, 1)
    assert not rig.blocks.short and len(rig.blocks.plain) == 1
    assert rig.plain().fault is None
    assert rig.pull(1, 1)
    rig.close()


@pytest.mark.parametrize(
    ("tensors", "nbytes"),
    [(0, 8), (1, 0), (1, NOW_NBYTES + 1), (2, NOW_NBYTES // 2 + 1), (MAX_UNIT_TENSORS + 1, 8)],
)
def test_what_an_owner_does_not_send_at_once_has_no_short_way(
    rig: UnitRig, tensors: int, nbytes: int
) -> None:
    bases: U64 = np.full(tensors, rig.here.ctypes.data, np.uint64)
    assert rig.channel.units(HEAD, bases, nbytes) is None


def test_units_that_are_not_what_they_were_are_asked_for_in_full(rig: UnitRig) -> None:
    assert rig.pull(1, 1)
    rig.blocks.stands = False
    assert rig.pull(2, 1)
    assert len(rig.blocks.plain) == 2 and rig.blocks.short == [1]
    rig.blocks.refusal = STALE
    kept = rig.sockets
    assert not rig.pull(3, 1)
    assert (rig.here == 0xA5).all()
    assert rig.plain().fault == STALE
    rig.blocks.refusal, rig.blocks.stands = None, True
    assert rig.pull(3, 1)
    assert rig.sockets == kept, "a refusal is an answer"
    assert rig.blocks.open_count == 0


CUTS = [0, 5, HEADER_NBYTES, HEADER_NBYTES + 1, HEADER_NBYTES + NBYTES - 1, HEADER_NBYTES + NBYTES]
CUTS += [HEADER_NBYTES + NBYTES + 5]


@pytest.mark.parametrize("most", CUTS)
def test_the_rest_of_an_answer_follows_in_turns(
    rig: UnitRig, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The socket was full."""

    def send_some(self: Iovecs, fd: int) -> int:
        table = self._table[self._head : self._tail]
        whole = b"".join(ctypes.string_at(int(address), int(nbytes)) for address, nbytes in table)
        sent = os.write(fd, whole[:most]) if most else 0
        self.advance(sent)
        return sent

    assert rig.pull(1, 1)
    monkeypatch.setattr(Iovecs, "send_now", send_some)
    for unit in range(3):
        assert rig.pull(unit, 5)
    assert rig.blocks.short == [1, 0, 1, 2]
    assert rig.owner_channel.bytes_out == rig.channel.bytes_in == 5 * NBYTES
    assert len(rig.sockets) == 1 and rig.blocks.open_count == 0


def test_a_request_in_pieces_is_none_of_several(rig: UnitRig) -> None:
    """The rest of one may look like a whole one: it is read as what it is, the selector of the first."""
    assert rig.pull(1, 1)
    inner = UnitRequests(HEAD, NBYTES).encode(9, 3)
    outer = encode_request(1, 0, NBYTES, inner)
    (sock,) = rig.sockets
    (connection,) = rig.owner._server._connections.values()
    sock.send(outer)
    assert wait_until(lambda: not connection._parser.empty)
    sock.send(inner)
    answer = sock.recv(2 * HEADER_NBYTES + NBYTES, socket.MSG_WAITALL)
    assert answer[:HEADER_NBYTES] == encode_data(1, NBYTES)
    assert rig.blocks.plain[-1] == inner and rig.blocks.short == [1]


# ---- cut short --------------------------------------------------------------------------------------


ODD = [
    encode_data(7, SIZE) + bytes(SIZE) + encode_end(7, EndKind.OK),
    encode_data(1, SIZE - 1) + bytes(SIZE - 1) + encode_end(1, EndKind.OK),
    encode_end(1, EndKind.OK),
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    encode_data(1, SIZE) + bytes(SIZE) + encode_end(2, EndKind.OK),
]


@pytest.mark.parametrize("answer", ODD, ids=["id", "short", "empty", "http", "end"])
def test_an_odd_answer_ends_the_connection(rig: UnitRig, answer: bytes) -> None:
    owner = Trickle(answer)
    channel = owner.open(rig.reader)
    sock = socket.create_connection(owner.address)
    channel.pool.adopt(sock)
    here = memory_of(1, SIZE, None)
    units = channel.units(HEAD, np.array([here.ctypes.data], np.uint64), SIZE)
    assert units is not None
    assert not units.read(0, 0, deadline=time.monotonic() + CALL_S, on_cut=lambda _: None)
    assert not channel.pool.sockets()
    owner.close()


@pytest.mark.parametrize("sent", [b"", encode_data(1, SIZE), encode_data(1, SIZE) + b"x" * 9])
@pytest.mark.parametrize("how", ["late", "cancel", "close"])
def test_an_owner_that_goes_no_further_is_not_waited_for(rig: UnitRig, sent: bytes, how: str) -> None:
    owner = Trickle(*([sent] if sent else []))
    channel = owner.open(rig.reader)
    channel.pool.adopt(socket.create_connection(owner.address))
    here = memory_of(1, SIZE, None)
    units = channel.units(HEAD, np.array([here.ctypes.data], np.uint64), SIZE)
    assert units is not None
    cuts: list[Any] = []
    began = time.monotonic()
    results: list[bool] = []
    deadline = began + (0.2 if how == "late" else CALL_S)
    read = threading.Thread(
        target=lambda: results.append(units.read(0, 0, deadline=deadline, on_cut=cuts.append))
    )
    read.start()
    if how == "cancel":
        assert wait_until(lambda: len(cuts) > 0)
        cuts[0]("enough")
    elif how == "close":
        assert wait_until(lambda: len(cuts) > 0)
        channel.close()
    read.join()
    assert results == [False]
    assert time.monotonic() - began < CALL_S / 2
    assert not channel.pool.sockets() and cuts[-1] is None
    owner.close()


def test_a_destination_that_cannot_be_written_is_an_answer(rig: UnitRig) -> None:
    units = rig.channel.units(HEAD, np.array([8, 8], np.uint64), SIZE)
    assert units is not None
    assert not units.read(0, 0, deadline=time.monotonic() + CALL_S, on_cut=lambda _: None)
    assert rig.plain().fault is None


# ---- requests ---------------------------------------------------------------------------------------


def test_requests_of_units_are_requests() -> None:
    requests = UnitRequests(HEAD, NBYTES)
    for number, unit in ((0, 0), (1, 7), (0xFFFFFFFF, 0xFFFFFFFF)):
        selector = HEAD + unit.to_bytes(4, "little")
        raw = requests.encode(number, unit)
        assert raw == encode_request(number, 0, NBYTES, selector) + selector
        assert unit_of(raw) == (number, unit)
        assert middle_of(raw) == middle_of(requests.encode(0, 0)) != b""
    assert middle_of(b"LDr2" + raw[4:]) == b""
    assert middle_of(UnitRequests(HEAD, NBYTES + 1).encode(1, 1)) != middle_of(raw)
    assert middle_of(UnitRequests(HEAD + b"?", NBYTES).encode(1, 1)) != middle_of(raw)
