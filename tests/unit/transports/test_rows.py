"""Repeated reads: what each thread has for itself, and how a read of ``local`` looks at its peer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import U64
from llm_datadist.testing.board import soon, uncut
from llm_datadist.transports import _libc
from llm_datadist.transports._one_sided import SPLIT_NBYTES
from llm_datadist.transports._rows import KernelRows, fit_one_call
from llm_datadist.transports.local_read import LocalRows, OwnProcess


def addresses(memory: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> U64:
    return np.array([tensor.ctypes.data for tensor in memory], dtype=np.uint64)


@pytest.mark.parametrize("tensors", [1, 3, 5])
def test_a_read_in_the_middle_of_another_has_arguments_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    source = np.arange(tensors * 40, dtype=np.uint8).reshape(tensors, 40)
    here = np.zeros_like(source)
    rows = KernelRows(os.getpid(), addresses(source), addresses(here), 10)
    prepare, within = _libc.repeated_read, [True]

    def prepared(*arguments: Any) -> Callable[[], int]:
        run = prepare(*arguments)

        def another_first() -> int:
            if not within:
                within.append(True)
                assert rows.move(10, 20)
            return run()

        return another_first

    monkeypatch.setattr(_libc, "repeated_read", prepared)
    assert rows.move(0, 20)
    within.clear()
    assert rows.move(30, 0)
    assert np.array_equal(here[:, :10], source[:, 30:])
    assert np.array_equal(here[:, 20:30], source[:, 10:20])
    assert not here[:, 10:20].any() and not here[:, 30:].any()


def test_arguments_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, here = np.ones((1, 40), np.uint8), np.zeros((1, 40), np.uint8)
    rows = KernelRows(os.getpid(), addresses(source), addresses(here), 10)
    assert rows.move(0, 0)
    monkeypatch.setattr(_libc, "repeated_read", lambda *_: pytest.fail("made anew"))
    assert rows.move(0, 30)


def test_less_than_all_is_not_all() -> None:
    """The kernel copies what it can: here the first of two tensors."""
    source, here = np.ones((1, 40), np.uint8), np.zeros((2, 40), np.uint8)
    rows = KernelRows(os.getpid(), np.array([source.ctypes.data, 8], np.uint64), addresses(here), 10)
    assert not rows.move(0, 0)
    assert here[0, :10].all() and not here[1].any()


@pytest.mark.parametrize(
    ("tensors", "nbytes", "fits"),
    [
        (1, 1, True),
        (1, SPLIT_NBYTES, True),
        (1, SPLIT_NBYTES + 1, False),
        (_libc.IOV_MAX, SPLIT_NBYTES // _libc.IOV_MAX, True),
        (_libc.IOV_MAX + 1, 1, False),
        (0, 1, False),
        (1, 0, False),
    ],
)
def test_what_one_call_moves(tensors: int, nbytes: int, fits: bool) -> None:
    assert fit_one_call(tensors, nbytes) == fits


class _Peer(OwnProcess):
    """This process, which ends, or whose channel is closed, at the last look."""

    def __init__(self, *, ends: bool = False, closes: bool = False) -> None:
        super().__init__()
        self.ends, self.closes = ends, closes

    def gone(self) -> bool:
        if self.closes:
            self.close()
        return self.ends


@pytest.mark.parametrize(
    ("peer", "all_there"), [(_Peer(), True), (_Peer(ends=True), False), (_Peer(closes=True), False)]
)
def test_the_peer_is_looked_at_after_the_last_byte(peer: _Peer, all_there: bool) -> None:
    source, here = np.ones((1, 40), np.uint8), np.zeros((1, 40), np.uint8)
    rows = LocalRows(peer, addresses(source), addresses(here), 10)
    assert rows.read(0, 0, deadline=soon(), on_cut=uncut) == all_there
    assert here[0, :10].all()
    here[:] = 0
    if not all_there and peer.closed:
        assert not rows.read(0, 0, deadline=soon(), on_cut=uncut)
        assert not here.any(), "it is looked at before the first byte, too"
    assert not rows.read(0, 0, deadline=time.monotonic(), on_cut=uncut)
    assert not here.any()
