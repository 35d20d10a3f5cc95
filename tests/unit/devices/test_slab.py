"""The word slab: values, reuse, threads, forks, and its memory as peers map it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist.devices import slab as slab_module
from llm_datadist.devices.shared_memory import NotSharable
from llm_datadist.devices.slab import Slab
from llm_datadist.transports import _libc

BIG = (1 << 64) - 1


def peek(pid: int, address: int) -> int:
    """What a reader in another process sees."""
    seen = np.zeros(1, dtype=np.uint64)
    assert _libc.read_one(pid, int(seen.ctypes.data), address, 8) == 8
    return int(seen[0])


def seen_by_others(address: int) -> int:
    """The same; 0 where there is nothing."""
    seen = np.zeros(1, dtype=np.uint64)
    assert _libc.read_one(os.getpid(), int(seen.ctypes.data), address, 8) in (8, -errno.EFAULT)
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


@pytest.fixture(params=["shared", "private"])
def slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slab]:
    """Its memory with and without a memfd."""
    if request.param == "private":
        monkeypatch.setattr(os, "memfd_create", refuse)
    slab = Slab()
    yield slab
    slab.close_descriptor()


def refuse(*arguments: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_f1_forked_child_sees_no_word_and_changes_nothing(slab: Slab) -> None:
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
            if refused == 2 and slab.load(address) == 0 and not seen_by_others(address):
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


def test_a_reader_that_maps_it_sees_every_store_and_no_more() -> None:
    slab = Slab()
    address, area = slab.allocate(5), slab.area
    with mmap.mmap(area.fd, area.nbytes, prot=mmap.PROT_READ) as reader:
        words = np.frombuffer(reader, dtype=np.uint64)
        at = (address - area.address) // 8
        assert words[at] == 5
        slab.store(address, BIG)
        assert words[at] == BIG
        slab.clear()
        assert words[at] == 0
        del words
    with pytest.raises(PermissionError):
        mmap.mmap(area.fd, area.nbytes)


def test_its_descriptor_goes_with_it_or_before_and_the_words_stay() -> None:
    slab = Slab()
    address, fd = slab.allocate(5), slab.area.fd
    slab.close_descriptor()
    slab.close_descriptor()
    assert not open_here(fd) and slab.load(address) == peek(os.getpid(), address) == 5
    slab = Slab()
    address, fd = slab.allocate(6), slab.area.fd
    assert open_here(fd)
    del slab
    gc.collect()
    assert not open_here(fd) and peek(os.getpid(), address) == 6


def open_here(fd: int) -> bool:
    try:
        return "llm-datadist-words" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def test_without_memfd_it_works_and_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse)
    slab = Slab()
    address = slab.allocate(5)
    assert slab.load(address) == peek(os.getpid(), address) == 5
    with pytest.raises(NotSharable, match=os.strerror(errno.ENOSYS)):
        _ = slab.area
    slab.close_descriptor()


def test_more_words_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_AREA_NBYTES", 4096)
    slab = Slab()
    words = [slab.allocate(1) for _ in range(512)]
    with pytest.raises(MemoryError, match="all 512 words are in use"):
        slab.allocate(1)
    slab.release(words[7])
    assert slab.allocate(2) == words[7]
