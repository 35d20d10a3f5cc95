"""Repeated reads over ``shm``: which of them are plain copies, which go by the kernel, and which cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from llm_datadist.testing.board import extents, soon, uncut
from llm_datadist.testing.owner import pattern
from llm_datadist.transports._rows import KernelRows
from llm_datadist.transports.shm_rows import Copy, ShmRows
from tests.support.memory import FILL, PAGE
from tests.support.shm_pair import MIB, ShmPair

NBYTES = 5 * PAGE


@pytest.fixture(params=[True, False], ids=["kernel allowed", "kernel refused"])
def pair(request: pytest.FixtureRequest) -> Iterator[ShmPair]:
    with closing(ShmPair(1, by_kernel=request.param)) as pair:
        pair._own.view()[:] = FILL
        yield pair


def rows(pair: ShmPair, bases: list[int], here: list[int], nbytes: int = 100) -> ShmRows | None:
    return pair.channel.rows(extents(bases, [(0, NBYTES)]), extents(here, [(0, NBYTES)]), nbytes)


def test_one_tensor_into_memory_of_a_pool_is_a_plain_copy(pair: ShmPair) -> None:
    (base,), own = pair.allocate([NBYTES], 5), pair._own.area
    for at in (0, 7, own.nbytes - NBYTES):
        pair._own.view()[:] = FILL
        prepared = rows(pair, [base], [own.address + at])
        assert prepared is not None and isinstance(prepared._rows, Copy)
        assert prepared.read(301, 1000, deadline=soon(), on_cut=uncut)
        expected = np.full(MIB, FILL, np.uint8)
        expected[at + 1000 : at + 1100] = pattern(5, NBYTES)[301:401]
        assert np.array_equal(pair._own.view(), expected)


def test_what_does_not_lie_in_a_pool_goes_by_the_kernel(pair: ShmPair) -> None:
    """A copy may only write where writing is sure to be allowed; a tensor that sticks out is not."""
    (base,), own = pair.allocate([NBYTES], 5), pair._own.area
    elsewhere = np.full(NBYTES, FILL, np.uint8)
    for here in (elsewhere.ctypes.data, own.address - 1, own.address + own.nbytes - NBYTES + 1):
        prepared = rows(pair, [base], [here])
        if not pair.reader._by_kernel:
            assert prepared is None
        else:
            assert prepared is not None and isinstance(prepared._rows, KernelRows)
    prepared = rows(pair, [base], [elsewhere.ctypes.data])
    if prepared is not None:
        assert prepared.read(301, 1000, deadline=soon(), on_cut=uncut)
        assert np.array_equal(elsewhere[1000:1100], pattern(5, NBYTES)[301:401])
        assert (elsewhere[:1000] == FILL).all() and (elsewhere[1100:] == FILL).all()


def test_several_tensors_go_by_the_kernel(pair: ShmPair) -> None:
    bases, own = pair.allocate([NBYTES] * 2, 5), pair._own.area
    prepared = rows(pair, bases, [own.address, own.address + NBYTES])
    if not pair.reader._by_kernel:
        assert prepared is None
        return
    assert prepared is not None and isinstance(prepared._rows, KernelRows)
    assert prepared.read(301, 0, deadline=soon(), on_cut=uncut)
    for at in range(2):
        assert np.array_equal(pair._own.view(at * NBYTES, 100), pattern(5 + at, NBYTES)[301:401])


def test_memory_that_the_peer_does_not_share_has_no_short_way(pair: ShmPair) -> None:
    here = pair._own.area.address
    assert rows(pair, [pair.beyond()], [here]) is None
    assert rows(pair, [pair.allocate([NBYTES], 5)[0], 8], [here, here]) is None


def test_a_plain_copy_is_late_closed_or_of_one_that_is_gone(pair: ShmPair) -> None:
    (base,), own = pair.allocate([NBYTES], 5), pair._own.area
    prepared = rows(pair, [base], [own.address])
    assert prepared is not None
    assert not prepared.read(0, 0, deadline=time.monotonic(), on_cut=uncut)
    assert (pair._own.view() == FILL).all()
    pair.kill()
    assert not prepared.read(0, 0, deadline=soon(), on_cut=uncut)
    pair._own.view()[:] = FILL
    pair.channel.close()
    assert not prepared.read(0, 0, deadline=soon(), on_cut=uncut)
    assert (pair._own.view() == FILL).all()


def test_the_memory_is_held_while_it_is_read(pair: ShmPair) -> None:
    """A channel that is closed meanwhile takes nothing away, and the read has failed."""
    (base,), own = pair.allocate([NBYTES], 5), pair._own.area
    prepared = rows(pair, [base], [own.address])
    assert prepared is not None
    move, users = prepared._rows.move, []

    class Closing:
        def move(self, there: int, here: int) -> bool:
            pair.channel.close()
            users.append(len(pair.channel.memory._users))
            return move(there, here)

    prepared._rows = Closing()  # type: ignore[assignment]
    assert not prepared.read(0, 0, deadline=soon(), on_cut=uncut)
    assert users == [1]
    assert not pair.channel.memory._users
