"""Units over TCP: one block of each tensor, again and again, with less ado than a plain read."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._core.segments import U64, Segments
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import tcp_reading
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
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support.tcp_rig import CALL_S, Trickle, extents_of, memory_of, sends_at_most
from tests.support.unit_rig import BLOCKS, HEAD, NBYTES, SIZE, STALE, UnitRig
from tests.support.world import wait_until


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
    monkeypatch.setattr(limits, "KNOWN_UNITS", 2)
    rig.units = [rig._units(bytes([65 + i]) * 9) for i in range(3)]
    for _ in range(2):
        for i in range(3):
            assert rig.pull(i, i, of=i)
    assert len(rig.served._known) <= 2


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
    assert not rig.served._known, "what is gone is not kept in mind"
    assert rig.plain().fault == STALE
    rig.blocks.refusal, rig.blocks.stands = None, True
    assert rig.pull(3, 1)
    rig.blocks.refusal, rig.blocks.stands = Fault(FaultKind.REFUSED, "", STALE.code), False
    assert not rig.pull(4, 4)
    rig.blocks.refusal, rig.blocks.stands = None, True
    assert rig.pull(5, 5), "nothing of the answer that did not come is still expected"
    assert rig.sockets == kept, "a refusal is an answer"
    assert rig.blocks.open_count == 0


CUTS = [0, 5, HEADER_NBYTES, HEADER_NBYTES + 1, HEADER_NBYTES + NBYTES - 1, HEADER_NBYTES + NBYTES]
CUTS += [HEADER_NBYTES + NBYTES + 5]


@pytest.fixture
def cut(rig: UnitRig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From the second answer on, the socket is full after so many bytes."""
    most = int(request.param)

    assert rig.pull(1, 1)
    monkeypatch.setattr(Iovecs, "send_now", sends_at_most(most))
    return most


@pytest.mark.parametrize("cut", CUTS, indirect=True)
def test_the_rest_of_an_answer_follows_in_turns(rig: UnitRig, cut: int) -> None:
    for unit in range(3):
        assert rig.pull(unit, 5)
    assert rig.blocks.short == [1, 0, 1, 2]
    assert {selector[:-4] for selector in rig.blocks.plain} == {HEAD}
    assert rig.owner_channel.bytes_out == rig.channel.bytes_in == 5 * NBYTES
    assert len(rig.sockets) == 1 and rig.blocks.open_count == 0


@pytest.mark.parametrize("cut", CUTS[:-2], indirect=True)
def test_units_withdrawn_before_the_rest_end_the_read_and_not_the_connection(rig: UnitRig, cut: int) -> None:
    rig.blocks.refusal, kept = STALE, rig.sockets
    assert not rig.pull(2, 2)
    assert cut or (rig.here == 0xA5).all()
    rig.blocks.refusal = None
    assert rig.pull(3, 3)
    assert rig.sockets == kept and rig.blocks.open_count == 0


# ---- what comes is read as what it is -----------------------------------------------------------------


def request_of(number: int, unit: int, start: int = 0) -> bytes:
    selector = HEAD + unit.to_bytes(4, "little")
    return encode_request(number, start, NBYTES, selector) + selector


def answered(rig: UnitRig, number: int, unit: int, start: int = 0) -> bool:
    """Whether that is what comes next."""
    stream = rig.there[:, unit * SIZE : (unit + 1) * SIZE].tobytes()[start:]
    expected = encode_data(number, len(stream)) + stream + encode_end(number, EndKind.OK)
    (sock,) = rig.sockets
    return sock.recv(len(expected), socket.MSG_WAITALL) == expected


def test_a_request_in_pieces_is_none_of_several(rig: UnitRig) -> None:
    """The rest of one may look like a whole one: it is read as what it is, the selector of the first."""
    assert rig.pull(1, 1)
    inner = UnitRequests(HEAD, NBYTES).encode(9, 3)
    (sock,) = rig.sockets
    sock.send(encode_request(1, 0, NBYTES, inner))
    assert wait_until(lambda: not rig.served._parser.empty)
    sock.send(inner)
    assert answered(rig, 1, 3)
    assert rig.blocks.plain[-1] == inner and rig.blocks.short == [1]


@pytest.mark.parametrize("at", [1, 8, 40])
def test_requests_cut_anywhere_are_answered_one_by_one(rig: UnitRig, at: int) -> None:
    """What comes at once is as long as a request, and is none."""
    (sock,) = rig.sockets
    for number in (10, 20):
        first, second = request_of(number, 3), request_of(number + 1, 4)
        sock.send(first[:at])
        assert wait_until(lambda: not rig.served._parser.empty)
        sock.send(first[at:] + second[:at])
        assert answered(rig, number, 3)
        sock.send(second[at:])
        assert answered(rig, number + 1, 4)
    assert not rig.blocks.short


def test_requests_that_come_together_are_answered_one_by_one(rig: UnitRig) -> None:
    """The same two each time."""
    (sock,) = rig.sockets
    for _ in range(2):
        sock.send(request_of(10, 3) + request_of(11, 4))
        assert answered(rig, 10, 3) and answered(rig, 11, 4)


def test_a_part_of_a_block_is_no_unit(rig: UnitRig) -> None:
    (sock,) = rig.sockets
    for number in (10, 20):
        sock.send(request_of(number, 3, start=100))
        assert answered(rig, number, 3, start=100)
    assert not rig.blocks.short


# ---- cut short --------------------------------------------------------------------------------------


ODD = [
    encode_data(7, SIZE) + bytes(SIZE) + encode_end(7, EndKind.OK),
    encode_data(1, SIZE - 1) + bytes(SIZE - 1) + encode_end(1, EndKind.OK),
    encode_end(1, EndKind.OK),
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    encode_data(1, SIZE) + bytes(SIZE) + encode_end(2, EndKind.OK),
    encode_data(1, SIZE - 1),
]


@pytest.mark.parametrize("answer", ODD, ids=["id", "short", "empty", "http", "end", "part"])
def test_an_odd_answer_ends_the_connection(rig: UnitRig, answer: bytes) -> None:
    owner = Trickle(answer)
    channel = owner.open(rig.reader)
    sock = socket.create_connection(owner.address)
    channel.pool.adopt(sock)
    here = memory_of(1, SIZE, None)
    units = channel.units(HEAD, np.array([here.ctypes.data], np.uint64), SIZE)
    assert units is not None
    watch = Stopwatch()
    assert not units.read(0, 0, deadline=watch.began + CALL_S, on_cut=lambda _: None)
    assert watch.within(CALL_S / 2), "more was waited for"
    assert not channel.pool.sockets()
    owner.close()


def test_an_answer_that_has_been_read_is_no_answer_to_the_next_request(rig: UnitRig) -> None:
    """Its owner sends it twice."""
    owner = Trickle(2 * (encode_data(1, SIZE) + bytes(SIZE) + encode_end(1, EndKind.OK)))
    channel = owner.open(rig.reader)
    channel.pool.adopt(socket.create_connection(owner.address))
    units = channel.units(HEAD, np.array([memory_of(1, SIZE, None).ctypes.data], np.uint64), SIZE)
    assert units is not None
    done = [units.read(0, 0, deadline=time.monotonic() + CALL_S, on_cut=lambda _: None) for _ in range(2)]
    assert done == [True, False]
    assert not channel.pool.sockets()
    owner.close()


def test_numbers_of_requests_begin_again(rig: UnitRig) -> None:
    (connection,) = rig.channel.pool._idle
    connection._last_id = 0xFFFFFFFE
    assert rig.pull(1, 1) and rig.pull(2, 2) and rig.pull(3, 3)
    assert connection._last_id == 1


def test_an_interrupted_read_has_ended(rig: UnitRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReadingConnection, "read_unit", interrupted)
    cuts: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        rig.units[0].read(0, 0, deadline=time.monotonic() + CALL_S, on_cut=cuts.append)
    assert len(cuts) == 2 and cuts[1] is None
    assert not rig.sockets


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
    watch = Stopwatch()
    results: list[bool] = []
    deadline = watch.began + (0.2 if how == "late" else CALL_S)
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
    assert watch.within(CALL_S / 2)
    assert not channel.pool.sockets() and cuts[-1] is None
    owner.close()


def test_a_request_that_does_not_go_out_at_once_is_given_up(
    rig: UnitRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner would wait for the rest, and we for the answer."""
    monkeypatch.setattr(tcp_reading, "send_now", lambda fd, data: os.write(fd, data[:-1]))
    watch = Stopwatch()
    assert not rig.pull(1, 1)
    assert watch.within(CALL_S / 2) and not rig.sockets


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
