"""What is mapped, told from /proc/self/maps without touching a page."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llm_datadist.devices import cpu
from llm_datadist.testing.owner import Memory

PAGE = 4096
TOP = 1 << 64


@pytest.fixture
def memory() -> Iterator[Memory]:
    with closing(Memory()) as memory:
        yield memory


@pytest.fixture
def base(memory: Memory) -> int:
    """Eight pages: page 3 is a hole, page 5 read-only, page 6 without access."""
    start = memory.map_sparse(8 * PAGE)
    memory.unmap(start + 3 * PAGE, PAGE)
    memory.protect(start + 5 * PAGE, PAGE, "r")
    memory.protect(start + 6 * PAGE, PAGE, "")
    return start


@pytest.mark.parametrize(
    ("offset", "nbytes", "readable", "writable"),
    [
        (0, 3 * PAGE, True, True),
        (1, 3 * PAGE - 1, True, True),
        (1, 3 * PAGE, False, False),
        (3 * PAGE - 1, 1, True, True),
        (3 * PAGE, 1, False, False),
        (4 * PAGE - 1, 2, False, False),
        (4 * PAGE, PAGE, True, True),
        (4 * PAGE, 2 * PAGE, True, False),
        (5 * PAGE - 1, 2, True, False),
        (5 * PAGE, PAGE + 1, False, False),
        (6 * PAGE, 1, False, False),
        (0, TOP, False, False),
        (0, TOP - 1, False, False),
        (6 * PAGE, 0, True, True),
    ],
)
@pytest.mark.rule("6.5", "6.6")
def test_rights_of_a_range(base: int, offset: int, nbytes: int, readable: bool, writable: bool) -> None:
    assert (cpu.first_unmapped([base + offset], nbytes) is None) == readable
    assert cpu.is_writable(base + offset, nbytes) == writable


def test_m1_the_first_bad_tensor_is_named(base: int) -> None:
    good = base + 7 * PAGE
    assert cpu.first_unmapped(np.array([base, good], dtype=np.uint64), PAGE) is None
    assert cpu.first_unmapped([good, base + 3 * PAGE, base, base + 6 * PAGE], PAGE) == 1
    assert cpu.first_unwritable([good, base, base + 5 * PAGE, base + 3 * PAGE], PAGE) == 2
    assert cpu.first_unmapped([], PAGE) is None


@pytest.mark.parametrize(
    ("address", "nbytes"),
    [(0, 1), (0x1000, 1), (TOP - 1, 1), (TOP - 1, 2), (TOP - PAGE, 2 * PAGE), (TOP - 8, TOP - 8)],
)
def test_m1_addresses_that_nobody_has(address: int, nbytes: int) -> None:
    assert cpu.first_unmapped([address], nbytes) == 0
    assert not cpu.is_writable(address, nbytes)


@pytest.mark.rule("6.7")
def test_no_page_is_touched(memory: Memory) -> None:
    start = memory.map_sparse(64 * PAGE)
    assert cpu.first_unmapped([start], 64 * PAGE) is None
    assert cpu.is_writable(start, 64 * PAGE)
    assert memory.resident_pages(start, 64 * PAGE) == 0


def test_many_tensors_and_many_mappings(memory: Memory) -> None:
    start = memory.map_sparse(3000 * PAGE)
    for i in range(0, 3000, 3):
        memory.protect(start + i * PAGE, PAGE, "r")
    addresses = np.arange(1000, dtype=np.uint64) * np.uint64(3 * PAGE) + np.uint64(start)
    assert cpu.first_unmapped(addresses, 3 * PAGE) is None
    assert cpu.first_unwritable(addresses + np.uint64(PAGE), 2 * PAGE) is None
    assert cpu.first_unwritable(addresses[5:] + np.uint64(PAGE), 2 * PAGE + 1) == 0
    memory.unmap(start + 2997 * PAGE, PAGE)
    assert cpu.first_unmapped(addresses, 1) == 999


def _mapped_file(flags: int) -> mmap.mmap:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 2 * PAGE)
        return mmap.mmap(fd, 2 * PAGE, flags=flags)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _mapped_file(mmap.MAP_SHARED),
        lambda: _mapped_file(mmap.MAP_PRIVATE),
        lambda: mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
    ],
    ids=["shared file", "private file", "shared memory"],
)
def test_what_is_of_a_file_is_not_anonymous(make: Callable[[], mmap.mmap], base: int) -> None:
    """It may be writable in the table, and be cut short."""
    with make() as mapping:
        array = np.frombuffer(mapping, dtype=np.uint8)
        start = array.ctypes.data
        del array
        assert cpu.is_writable(start, 2 * PAGE)
        assert cpu.first_not_anonymous([base, start, base + PAGE], PAGE) == 1


def test_anonymous_memory(base: int) -> None:
    """Mapped, of the heap and of a stack; nothing that cannot be written."""
    assert cpu.first_not_anonymous([base, base + 4 * PAGE], PAGE) is None
    assert cpu.first_not_anonymous([base, base + 5 * PAGE], PAGE) == 1
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    named = {line[5]: int(line[0].split("-")[0], 16) for line in lines if len(line) > 5}
    for name in ("[heap]", "[stack]"):
        assert cpu.first_not_anonymous([named[name]], PAGE) is None
