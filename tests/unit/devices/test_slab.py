"""The word slab: values, reuse, threads and forks."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from llm_datadist.devices.slab import Slab
from llm_datadist.transports import _libc

BIG = (1 << 64) - 1


def peek(pid: int, address: int) -> int:
    """What a reader in another process sees."""
    seen = np.zeros(1, dtype=np.uint64)
    assert _libc.read_one(pid, int(seen.ctypes.data), address, 8) == 8
    return int(seen[0])


def test_a_word_holds_its_value_at_an_aligned_address() -> None:
    slab = Slab()
    first, second = slab.allocate(1), slab.allocate(BIG)
    assert first % 8 == second % 8 == 0 and abs(first - second) >= 8
    assert slab.load(first) == peek(os.getpid(), first) == 1
    assert slab.load(second) == peek(os.getpid(), second) == BIG
    slab.store(first, 77)
    assert (slab.load(first), slab.load(second)) == (77, BIG)


def test_released_word_is_zero_and_its_slot_serves_again() -> None:
    slab = Slab()
    address, other = slab.allocate(5), slab.allocate(6)
    slab.release(address)
    assert peek(os.getpid(), address) == 0 and slab.load(other) == 6
    slab.release(address)
    assert slab.allocate(9) == address
    slab.release(address)
    assert slab.load(slab.allocate(10)) == 10


def test_clear_zeroes_every_word_and_stays_mapped_without_the_slab() -> None:
    slab = Slab()
    addresses = [slab.allocate(i + 1) for i in range(20_000)]
    assert len(set(addresses)) == 20_000 and all(slab.load(a) == i + 1 for i, a in enumerate(addresses))
    slab.clear()
    del slab
    assert not any(peek(os.getpid(), a) for a in addresses)


def test_after_clear_every_slot_serves_again() -> None:
    slab, words = Slab(), 3 * (64 << 10) // 8  # three whole chunks
    before = {slab.allocate(1) for _ in range(words)}
    slab.clear()
    assert {slab.allocate(2) for _ in range(words)} == before


def test_a_word_cleared_is_in_use_no_longer() -> None:
    slab = Slab()
    address = slab.allocate(5)
    slab.clear()
    slab.release(address)
    with pytest.raises(ValueError, match="not a word of this slab in use"):
        slab.store(address, 4)
    assert peek(os.getpid(), address) == 0
    assert slab.load(slab.allocate(3)) == 3


@pytest.mark.parametrize("value", [0, -1, 1 << 64])
def test_value_outside_its_range(value: int) -> None:
    slab = Slab()
    address = slab.allocate(1)
    with pytest.raises(ValueError, match=str(value)):
        slab.allocate(value)
    with pytest.raises(ValueError, match=str(value)):
        slab.store(address, value)


def test_foreign_address() -> None:
    slab = Slab()
    address = slab.allocate(1)
    for bad in (0, 8, address + 1, address + 8 if address % 4096 else address - 8):
        with pytest.raises(ValueError, match=hex(bad)):
            slab.store(bad, 1)
        with pytest.raises(ValueError, match=hex(bad)):
            slab.load(bad)


def test_threads_never_share_a_slot() -> None:
    slab, failures = Slab(), []

    def work(seed: int) -> None:
        for i in range(1, 1500):
            value = seed * 10_000 + i
            address = slab.allocate(value)
            if slab.load(address) != value:
                failures.append(address)
            if i % 2:
                slab.release(address)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_f1_forked_child_sees_zeros_and_changes_nothing() -> None:
    slab = Slab()
    address = slab.allocate(5)
    report, result = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict = b"bad"
        try:
            slab.release(address)
            slab.clear()
            refused = 0
            for call in (lambda: slab.allocate(1), lambda: slab.store(address, 1)):
                try:
                    call()
                except RuntimeError as exc:
                    refused += "fork" in str(exc)
            if refused == 2 and slab.load(address) == 0 and peek(os.getpid(), address) == 0:
                verdict = b"good"
        finally:
            os.write(result, verdict)
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(report, 10) == b"good"
    os.close(report)
    os.close(result)
    assert slab.load(address) == peek(os.getpid(), address) == 5


def test_f1_fork_while_another_thread_holds_the_lock() -> None:
    """The lock is never released in the child; nothing there may wait for it."""
    slab = Slab()
    address = slab.allocate(5)
    slab._lock.acquire()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # a child that waits for the lock must not outlive the test
        slab.release(address)
        slab.clear()
        os._exit(slab.load(address))
    slab._lock.release()
    assert os.waitpid(pid, 0)[1] == 0
