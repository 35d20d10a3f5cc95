"""Whether memory may be written: by a question to the kernel, by making pages ready, or by the table of mappings."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Extents
from llm_datadist.devices import writability
from llm_datadist.devices.cpu import first_unwritable_run
from llm_datadist.devices.mapping import map_memory
from llm_datadist.devices.writability import Writability
from tests.support.memory import PAGE, Mapping

LIBC = ctypes.CDLL(None, use_errno=True)
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
KINDS = ["asked", "made ready", "table"]


def _opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> Writability:
    made = Writability()
    if kind == "asked":
        made.open()
        if made.fd < 0:
            pytest.skip("this kernel has no PROCMAP_QUERY (Linux 6.11)")
    elif kind == "table":  # a kernel that knows neither
        monkeypatch.setattr(writability, "_madvise", _refuse)
    return made


def _refuse(*_: Any) -> int:
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writability]:
    made = _opened(request.param, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writability]:
    made = _opened("asked", monkeypatch)
    yield made
    made.close()


@pytest.fixture
def pages() -> Iterator[int]:
    """16 pages, each a mapping of its own; page 5 is read-only, page 9 without access, page 12 a hole."""
    mapping = Mapping(16 * PAGE)
    for page in range(0, 16, 2):  # so that neighbours are not joined
        assert not LIBC.madvise(
            _at(mapping.address + page * PAGE), ctypes.c_size_t(PAGE), 16
        )  # MADV_DONTDUMP
    _protect(mapping.address + 5 * PAGE, mmap.PROT_READ)
    _protect(mapping.address + 9 * PAGE, 0)
    assert not LIBC.munmap(_at(mapping.address + 12 * PAGE), ctypes.c_size_t(PAGE))
    yield mapping.address
    mapping.close()


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _protect(address: int, rights: int, nbytes: int = PAGE) -> None:
    assert not LIBC.mprotect(_at(address), ctypes.c_size_t(nbytes), rights)


def _extents(bases: list[int], runs: list[tuple[int, int]]) -> Extents:
    offsets, lengths = (np.array(column, np.uint64) for column in zip(*runs, strict=True))
    return Extents.of(np.array(bases, np.uint64), offsets, lengths)


@pytest.mark.parametrize(
    ("tensors", "runs", "found"),
    [
        ([0], [(0, 5 * PAGE)], None),
        ([0, 6], [(0, 3 * PAGE)], None),
        ([13, 0], [(PAGE, PAGE), (2 * PAGE, 7)], None),
        ([0, 5], [(0, PAGE)], (1, 5)),
        ([0, 1, 9], [(0, 1)], (2, 9)),
        ([1, 12], [(0, PAGE)], (1, 12)),
        ([4, 4], [(0, 1), (PAGE, 1)], (0, 5)),
        ([4], [(0, 1), (2 * PAGE, 1)], None),  # spares the page that cannot be written
        ([10, 10], [(PAGE - 1, 1), (3 * PAGE, 1)], None),
    ],
)
def test_g5_the_first_run_that_cannot_be_written(
    memory: Writability,
    pages: int,
    tensors: list[int],
    runs: list[tuple[int, int]],
    found: tuple[int, int] | None,
) -> None:
    bases = [pages + page * PAGE for page in tensors]
    bad = memory.first_unwritable(_extents(bases, runs))
    assert bad == (None if found is None else (found[0], pages + found[1] * PAGE))


def test_g5_what_is_asked_is_what_the_table_says(asked: Writability, pages: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        bases = (pages + rng.integers(0, 12 * PAGE, rng.integers(1, 5))).tolist()
        starts = np.sort(rng.integers(0, 3 * PAGE, rng.integers(1, 4))).tolist()
        runs = [(start, int(rng.integers(1, PAGE))) for start in starts]
        extents = Extents(
            np.array(bases, np.uint64), np.array([r[0] for r in runs], np.uint64),
            np.array([r[1] for r in runs], np.uint64), np.cumsum([r[1] for r in runs], dtype=np.uint64),
            sum(r[1] for r in runs),
        )  # fmt: skip
        assert asked.first_unwritable(extents) == first_unwritable_run(extents)


def test_nothing_to_write(memory: Writability) -> None:
    nothing = np.empty(0, np.uint64)
    assert memory.first_unwritable(Extents(np.array([1], np.uint64), nothing, nothing, nothing, 0)) is None


def test_many_tensors_and_runs(memory: Writability) -> None:
    mapping = Mapping(600 * PAGE)
    bases = [mapping.address + i * PAGE for i in range(600)]
    runs = [(8 * i, 4) for i in range(200)]
    assert memory.first_unwritable(_extents(bases, runs)) is None
    _protect(bases[577], mmap.PROT_READ)
    assert memory.first_unwritable(_extents(bases, runs)) == (577, bases[577])
    mapping.close()


def test_a_hole_within_one_run_is_not_seen_by_its_ends(asked: Writability, pages: int) -> None:
    """What an older kernel leaves to the copy, a newer one tells."""
    whole = _extents([pages], [(4 * PAGE, 3 * PAGE)])
    assert asked.first_unwritable(whole) == (0, pages + 4 * PAGE)
    assert Writability().first_unwritable(whole) is None


# ---- files --------------------------------------------------------------------------------------------


@pytest.fixture
def file() -> Iterator[tuple[int, int]]:
    """A file of eight pages and where it is mapped; nothing in it is there yet."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * PAGE)
    address = map_memory(None, 8 * PAGE, READ_WRITE, mmap.MAP_SHARED, fd)
    yield fd, address
    os.close(fd)
    LIBC.munmap(_at(address), ctypes.c_size_t(8 * PAGE))


@pytest.mark.parametrize("kind", ["asked", "made ready"])
def test_g5_a_file_that_was_cut_short(
    kind: str, file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _opened(kind, monkeypatch)
    fd, address = file
    bases, runs = [address, address + 4 * PAGE], [(0, 10), (2 * PAGE, PAGE)]
    assert memory.first_unwritable(_extents(bases, runs)) is None
    os.ftruncate(fd, 6 * PAGE)
    row, at = memory.first_unwritable(_extents(bases, runs)) or (None, 0)
    assert (row, at // PAGE) == (1, address // PAGE + 6)
    assert memory.first_unwritable(_extents(bases, runs[:1])) is None
    memory.close()


def test_g5_a_file_that_was_cut_short_before_another_that_was_not(
    asked: Writability, file: tuple[int, int]
) -> None:
    fd, address = file
    other = os.memfd_create("other")
    os.ftruncate(other, 8 * PAGE)
    there = map_memory(None, 8 * PAGE, READ_WRITE, mmap.MAP_SHARED, other)
    try:
        bases = [address, there]
        assert asked.first_unwritable(_extents(bases, [(0, 8 * PAGE)])) is None
        os.ftruncate(fd, 6 * PAGE)
        row, at = asked.first_unwritable(_extents(bases, [(0, 8 * PAGE)])) or (None, 0)
        assert row == 0 and address + 6 * PAGE <= at < address + 8 * PAGE
    finally:
        os.close(other)
        LIBC.munmap(_at(there), ctypes.c_size_t(8 * PAGE))


def test_no_byte_is_changed_and_few_pages_are_made(asked: Writability, file: tuple[int, int]) -> None:
    fd, address = file
    os.pwrite(fd, b"x" * 100, 3 * PAGE)
    before = os.fstat(fd).st_blocks
    assert asked.first_unwritable(_extents([address], [(0, 8 * PAGE)])) is None
    assert os.fstat(fd).st_blocks - before == PAGE // 512, "one page, the last"
    assert os.pread(fd, 8 * PAGE, 0) == bytes(3 * PAGE) + b"x" * 100 + bytes(5 * PAGE - 100)


def test_memory_of_a_device_is_not_asked_for_pages(
    asked: Writability, file: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel cannot make any (EINVAL), what the mapping allows counts."""
    monkeypatch.setattr(writability, "_madvise", _refuse)
    assert asked.first_unwritable(_extents([file[1]], [(0, 8 * PAGE)])) is None


# ---- the same question again -----------------------------------------------------------------------------


def _bases(address: int, count: int, pages: int = 2) -> Any:
    return np.array([address + i * pages * PAGE for i in range(count)], np.uint64)


def test_again_is_one_question_where_there_is_one_mapping(asked: Writability) -> None:
    mapping = Mapping(12 * PAGE)
    again = asked.again(_bases(mapping.address, 4, 3), 2 * PAGE, sealed=False)
    assert again._asked is not None and len(again._asked) == 1
    assert again.all_writable()
    _protect(mapping.address + 3 * PAGE, mmap.PROT_READ)
    assert not again.all_writable()
    assert again.unit_writable(PAGE, PAGE), "the other page of each tensor"
    assert not again.unit_writable(0, 8)
    _protect(mapping.address + 3 * PAGE, READ_WRITE)
    assert again.all_writable()
    mapping.close()


def test_again_over_many_mappings(asked: Writability, pages: int) -> None:
    again = asked.again(_bases(pages, 2), 2 * PAGE, sealed=False)
    assert again.all_writable()
    beyond = asked.again(_bases(pages, 3), 2 * PAGE, sealed=False)
    assert not beyond.all_writable()
    assert beyond.unit_writable(0, PAGE) and not beyond.unit_writable(PAGE, PAGE)


def test_again_of_a_file(asked: Writability, file: tuple[int, int]) -> None:
    """Which may be cut short, unless it is sealed."""
    fd, address = file
    bases = _bases(address, 2, 4)
    assert asked.again(bases, 4 * PAGE, sealed=True).all_writable()
    again = asked.again(bases, 4 * PAGE, sealed=False)
    assert not again.all_writable()
    assert again.unit_writable(3 * PAGE, PAGE)
    os.ftruncate(fd, 7 * PAGE)
    assert not again.unit_writable(3 * PAGE, PAGE) and again.unit_writable(2 * PAGE, PAGE)


def test_again_when_it_was_closed(asked: Writability) -> None:
    mapping = Mapping(PAGE)
    again = asked.again(_bases(mapping.address, 1), PAGE, sealed=False)
    asked.close()
    asked.close()
    assert not again.all_writable() and again.unit_writable(0, PAGE)
    mapping.close()


def test_without_a_descriptor_it_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr(os, "open", none_left)
    memory = Writability()
    memory.open()
    assert memory.fd < 0
    mapping = Mapping(2 * PAGE)
    _protect(mapping.address + PAGE, mmap.PROT_READ)
    assert memory.first_unwritable(_extents([mapping.address, mapping.address + PAGE], [(0, 8)])) == (
        1, mapping.address + PAGE,
    )  # fmt: skip
    mapping.close()


def test_a_kernel_without_the_question_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writability, "_ioctl", _refuse)
    before = len(os.listdir("/proc/self/fd"))
    memory = Writability()
    memory.open()
    assert memory.fd < 0 and len(os.listdir("/proc/self/fd")) == before
