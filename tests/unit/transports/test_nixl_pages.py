"""Whether memory is there to be written: each kind of hole, in few pieces and in many."""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist.transports import nixl_pages
from llm_datadist.transports.nixl_pages import first_hole
from tests.support.memory import PAGE, Mapping

PAGES = 3000  # more than one call takes
LIBC = ctypes.CDLL(None)
COUNTS = pytest.mark.parametrize("count", [1, 2, nixl_pages._FEW, nixl_pages._FEW + 1, 1024, PAGES])


@pytest.fixture
def memory() -> Iterator[Mapping]:
    memory = Mapping(PAGES * PAGE)
    yield memory
    memory.close()


def hole(address: int, count: int, skip: int = 100) -> int | None:
    """Of as many pieces as this, one in each page, which touch neither end of it."""
    starts = np.uint64(address + skip) + np.arange(count, dtype=np.uint64) * np.uint64(PAGE)
    return first_hole(starts, np.full(count, PAGE - 2 * skip, dtype=np.uint64))


def protect(address: int, rights: int) -> None:
    assert not LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), rights)


@COUNTS
def test_memory_that_can_be_written_is_asked_of_the_kernel_alone(
    memory: Mapping, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a microsecond; the table of mappings takes milliseconds. No byte changes."""
    if count > nixl_pages._FEW and not _together():
        pytest.skip("this kernel has no process_madvise for many pieces")
    memory.view(0, PAGES * PAGE)[:] = 0xA5
    monkeypatch.setattr(nixl_pages, "first_unwritable", None)
    assert hole(memory.address, count) is None
    assert (memory.view(0, PAGES * PAGE) == 0xA5).all()


def _together() -> bool:
    page = Mapping(PAGE)
    try:
        one = np.array([page.address], dtype=np.uint64), np.array([PAGE], dtype=np.uint64)
        return nixl_pages._first_refused_of_many(*one) is None
    finally:
        page.close()


@COUNTS
@pytest.mark.parametrize("rights", [mmap.PROT_READ, 0], ids=["read-only", "no rights"])
@pytest.mark.parametrize("old", [False, True], ids=["this kernel", "an old kernel"])
def test_the_first_hole_is_found(
    memory: Mapping, count: int, rights: int, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(nixl_pages, "POPULATE_WRITE", 9999)  # EINVAL
    assert hole(memory.address, count) is None
    last = memory.address + (count - 1) * PAGE
    protect(last, rights)
    protect(memory.address + (count // 2) * PAGE, rights)
    assert hole(memory.address, count) == memory.address + (count // 2) * PAGE + 100
    if count > 1:
        assert hole(memory.address, count // 2) is None


def test_a_long_piece_with_a_hole_is_one(memory: Mapping) -> None:
    whole = np.array([memory.address + 5], dtype=np.uint64), np.array([PAGES * PAGE - 10], dtype=np.uint64)
    assert first_hole(*whole) is None
    protect(memory.address + 77 * PAGE, mmap.PROT_READ)
    assert first_hole(*whole) == memory.address + 5


def test_pages_of_a_sparse_destination_stay_away(memory: Mapping) -> None:
    """But for those that are about to be written."""
    before = _resident()
    assert hole(memory.address, 3) is None
    assert _resident() - before < 100


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


@pytest.mark.parametrize("count", [1, 3, 100])
def test_memory_of_a_file_that_was_cut_short_is_a_hole(count: int) -> None:
    """It is in the table of mappings as before, and a store there is SIGBUS."""
    if count > nixl_pages._FEW and not _together():
        pytest.skip("this kernel has no process_madvise for many pieces")
    with tempfile.TemporaryFile() as file:
        file.truncate(100 * PAGE)
        held = mmap.mmap(file.fileno(), 100 * PAGE)
        address = int(np.frombuffer(held, dtype=np.uint8).ctypes.data)
        assert hole(address, count) is None
        file.truncate((count // 2) * PAGE)
        assert hole(address, count) == address + (count // 2) * PAGE + 100
