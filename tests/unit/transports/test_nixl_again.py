"""Transport ``nixl`` with agents that are not NIXL's: reads that are made again and again."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist.testing.board import extents, uncut
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import nixl_again, nixl_session
from llm_datadist.transports.nixl_again import NixlRows
from llm_datadist.transports.seam import Fault, FaultKind
from tests.support.memory import PAGE, Mapping
from tests.support.nixl_rig import SIZE, Rig, kind_of, region

LIBC = ctypes.CDLL(None)
HALF = SIZE // 2


@pytest.fixture(params=[False, True], ids=["later", "at once"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig()
    rig.world.at_once = request.param
    rig.tell(rig.source, nbytes=4 * SIZE)
    yield rig
    rig.close()


def word(rig: Rig, at: int = 0, time_s: float = 10) -> int | Fault:
    return rig.channel.read_word(rig.source + at, deadline=time.monotonic() + time_s)


def right(rig: Rig, at: int = 0) -> int:
    return int.from_bytes(rig.there[at : at + 8].tobytes(), "little")


def rows_of(rig: Rig, nbytes: int = HALF) -> NixlRows:
    """Units of two tensors, of 2 x SIZE each."""
    whole = [(0, 2 * SIZE)]
    there, here = rig.source, rig.destination
    rows = rig.channel.rows(
        extents([there, there + 2 * SIZE], whole), extents([here, here + 2 * SIZE], whole), nbytes
    )
    assert rows is not None
    return rows


def read(rows: NixlRows, there: int = HALF, here: int = SIZE, time_s: float = 10) -> bool:
    return rows.read(there, here, deadline=time.monotonic() + time_s, on_cut=uncut)


# ---- words --------------------------------------------------------------------------------------------


def test_a_word_that_is_read_again_makes_no_transfer(rig: Rig) -> None:
    for _ in range(2):
        assert word(rig) == right(rig)
    (agent,) = rig.world.readers()
    assert len(agent._transfers) == 1
    number = next(rig.world.keys)
    for i in range(20):
        rig.there[:8] = i
        assert word(rig) == right(rig)
    assert next(rig.world.keys) == number + 1, "none was made"


def test_words_beyond_what_is_kept_are_read_as_well(rig: Rig) -> None:
    """And the transfers of no more than that are there: the latest."""
    last = nixl_session._MAX_WORDS + 8
    for _ in range(3):
        for i in range(last + 1):
            assert word(rig, 8 * i) == right(rig, 8 * i)
    (agent,) = rig.world.readers()
    assert len(agent._transfers) == nixl_session._MAX_WORDS
    number = next(rig.world.keys)
    for i in (last, last - nixl_session._MAX_WORDS + 1):
        assert word(rig, 8 * i) == right(rig, 8 * i)
    assert next(rig.world.keys) == number + 1, "none was made"


def test_a_word_that_does_not_arrive_is_not_the_former_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX may call a copy a success that brought nothing."""
    for _ in range(3):
        assert word(rig) == right(rig) != 0
    monkeypatch.setattr(ctypes, "memmove", lambda *args: None)
    assert word(rig) == 0


def test_threads_read_one_word_at_once(rig: Rig) -> None:
    answers: set[int | Fault] = set()

    def work() -> None:
        for _ in range(200):
            answers.add(word(rig))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {right(rig)}


def test_a_word_that_does_not_come_is_cut_at_the_deadline(rig: Rig) -> None:
    for _ in range(3):
        word(rig)
    before = rig.world.readers()
    rig.world.held.set()
    watch = Stopwatch()
    assert kind_of(word(rig, time_s=0.2)) is FaultKind.TIMEOUT
    assert watch.elapsed >= 0.2 and watch.within(5)
    assert not set(before) & set(rig.world.readers()), "destroyed, or it would write later"
    assert kind_of(word(rig, time_s=0)) is FaultKind.TIMEOUT
    rig.world.held.clear()
    assert word(rig) == right(rig)


def test_a_word_of_a_peer_that_is_gone_has_the_reason(rig: Rig) -> None:
    for _ in range(3):
        word(rig)
    rig.world.unreachable |= {rig.owner._serving.name}
    for _ in range(3):
        assert kind_of(word(rig)) is FaultKind.PEER_LOST
    rig.world.unreachable.clear()
    assert word(rig) == right(rig)


def test_an_interrupted_word_leaves_no_transfer(rig: Rig) -> None:
    for _ in range(3):
        word(rig)

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.world.before_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        word(rig)
    rig.world.before_end = None
    assert not rig.world.readers()
    assert word(rig) == right(rig)


# ---- units of tensors ---------------------------------------------------------------------------------


def test_any_unit_goes_anywhere(rig: Rig) -> None:
    rows = rows_of(rig)
    for there, here in ((0, 0), (HALF, SIZE), (3 * HALF, 7)):
        rig.here[:] = 0
        expected = rig.here.copy()
        for tensor in (0, 2 * SIZE):
            expected[tensor + here : tensor + here + HALF] = rig.there[tensor + there : tensor + there + HALF]
        assert read(rows, there, here)
        assert np.array_equal(rig.here, expected)


def test_what_is_out_of_reach_or_too_much_has_no_short_way(rig: Rig) -> None:
    whole = [(0, SIZE)]
    there, here = extents([rig.source], whole), extents([rig.destination], whole)
    outside = extents([rig.source + 4 * SIZE], whole)
    assert rig.channel.rows(there, here, SIZE) is not None
    assert rig.channel.rows(outside, here, SIZE) is None
    assert rig.channel.rows(there, outside, SIZE) is None
    assert rig.channel.rows(there, here, 0) is None
    assert rig.channel.rows(there, here, (1 << 20) + 1) is None


def test_a_hole_is_left_to_the_plain_way(rig: Rig) -> None:
    """Which says what it is; nothing has moved."""
    memory = Mapping(2 * PAGE)
    token = rig.reader.register(region(memory.address, nbytes=2 * PAGE))
    there = extents([rig.source], [(0, 2 * PAGE)])
    rows = rig.channel.rows(there, extents([memory.address], [(0, 2 * PAGE)]), 2 * PAGE)
    assert rows is not None and read(rows, 0, 0)
    memory.view(0, 2 * PAGE)[:] = 0xA5
    assert not LIBC.mprotect(ctypes.c_void_p(memory.address + PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ)
    assert not read(rows, 0, 0)
    assert (memory.view(0, 2 * PAGE) == 0xA5).all()
    assert rig.world.readers(), "the session is as good as before"
    rig.reader.unregister(token)
    memory.close()


def test_a_unit_that_does_not_come_is_cut_at_the_deadline(rig: Rig) -> None:
    rows = rows_of(rig)
    assert read(rows)
    before = rig.world.readers()
    rig.here[:] = 0
    rig.world.held.set()
    assert not read(rows, time_s=0.1)
    assert not set(before) & set(rig.world.readers()), "destroyed, or it would write later"
    rig.world.held.clear()
    assert not rig.here.any()
    assert read(rows)


def test_a_channel_that_is_closed_meanwhile_ends_it(rig: Rig) -> None:
    rows = rows_of(rig)
    assert read(rows)
    rig.here[:] = 0
    rig.world.held.set()
    rig.world.before_end = rig.channel.close
    watch = Stopwatch()
    assert not read(rows, time_s=60)
    assert watch.within(30)
    rig.world.before_end = None
    rig.world.held.clear()
    assert not rig.here.any() and not rig.world.readers()
    made = len(rig.world.made)
    assert not read(rows)
    assert len(rig.world.made) == made, "a closed channel makes no session"


def test_after_a_loss_reads_go_the_plain_way_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_again, "_PLAIN_S", 0.3)
    rows = rows_of(rig)
    assert read(rows)
    rig.world.unreachable |= {rig.owner._serving.name}
    rig.here[:] = 0
    watch = Stopwatch()
    assert not read(rows)
    rig.world.unreachable.clear()
    losses = rig.world.losses
    while not read(rows):
        assert watch.within(10)
    assert watch.elapsed >= 0.3
    assert rig.world.losses == losses


def test_what_is_slow_goes_the_plain_way_where_it_can_be_cut_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(rig)
    rig.world.at_once = False
    monkeypatch.setattr(nixl_again, "SLOW_S", 1e-9)
    assert read(rows)
    assert not read(rows)
    rows = rows_of(rig)
    rig.channel.pace.nbytes = 2 * HALF - 1
    assert not read(rows)
    rig.channel.pace.nbytes = 2 * HALF
    assert read(rows)


@pytest.mark.parametrize("plain", [False, True])
def test_an_interrupted_read_leaves_no_transfer(rig: Rig, plain: bool) -> None:
    rows = rows_of(rig)
    assert read(rows)

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.world.before_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.read() if plain else read(rows)
    rig.world.before_end = None
    assert not rig.world.readers()
    assert read(rows)


def test_what_another_read_has_cut_is_left_to_the_plain_way(rig: Rig) -> None:
    rows = rows_of(rig)
    assert read(rows)
    rig.world.at_once = False

    def cut() -> None:
        rig.world.held.set()
        session = rig.channel._session
        assert session is not None
        session.doom()

    rig.world.before_end = cut
    assert not read(rows)
    rig.world.before_end = None
    rig.world.held.clear()
    assert not rig.world.readers()
    rig.check()
    assert read(rows), "at once: it was not its own fault"
