"""§6 Pools: memory behind a pool, and what the machine has."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_datadist.devices import pool_memory
from llm_datadist.devices.pool_memory import PoolMemory, available_nbytes
from llm_datadist.devices.shared_memory import NotSharable
from llm_datadist.transports import _libc

MIB = 1 << 20


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "llm-datadist-pool" in line]


@pytest.mark.parametrize(
    ("nbytes", "alignment"), [(1024, 1024), (3 * MIB, 1 << 16), (5 * 1024, 1024), (64 * MIB, 1 << 25)]
)
@pytest.mark.rule("6.71", "6.72")
def test_it_is_aligned_zero_readable_from_outside_and_leaves_nothing(nbytes: int, alignment: int) -> None:
    address_space = _virtual_nbytes()
    memory = PoolMemory(nbytes, alignment)
    try:
        assert memory.address % alignment == 0
        assert _virtual_nbytes() - address_space < nbytes + MIB, "the reservation was not trimmed"
        whole = bytes_at(memory.address, nbytes)
        assert not whole.any()
        whole[-1] = 7
        seen = np.zeros(1, np.uint8)
        assert _libc.read_one(os.getpid(), seen.ctypes.data, memory.address + nbytes - 1, 1) == 1
        assert seen[0] == 7
        assert os.pread(memory.fd, 1, nbytes - 1) == b"\7"  # what a peer that is given it would see
        assert len(mappings()) == 1
    finally:
        memory.close()
    memory.close()
    assert not mappings()
    assert not any("llm-datadist-pool" in _link(fd) for fd in os.listdir("/proc/self/fd"))


READER = """
import mmap, os, sys
fd = int(sys.argv[1])
with mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as memory:
    assert memory[5] == 7
for harm in (
    lambda: mmap.mmap(fd, 1 << 20),
    lambda: os.pwrite(fd, b"x", 0),
    lambda: os.ftruncate(fd, 0),
    lambda: os.ftruncate(fd, 2 << 20),
    lambda: os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC),
):
    try:
        harm()
    except PermissionError:
        continue
    sys.exit("a reader can harm it")
"""


@pytest.mark.rule("6.73")
def test_another_process_that_is_given_it_maps_it_and_can_only_read() -> None:
    memory = PoolMemory(MIB, 1 << 16)
    try:
        whole = bytes_at(memory.address, MIB)
        whole[5] = 7
        area = memory.area
        assert (area.address, area.nbytes) == (memory.address, MIB)
        command = [sys.executable, "-c", READER, str(area.fd)]
        subprocess.run(command, pass_fds=[area.fd], check=True, timeout=20)
        whole[6] = 8  # its owner goes on writing
        assert whole[5] == 7 and os.pread(area.fd, 2, 5) == b"\7\10"
        del whole
    finally:
        memory.close()


def test_without_seals_it_works_and_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 5.1 refuses FUTURE_WRITE with EINVAL."""

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    memory = PoolMemory(MIB, 1 << 16)
    try:
        bytes_at(memory.address, MIB)[5] = 7
        with pytest.raises(NotSharable, match=r"cannot seal memory for readers \(.*Invalid.*Linux 5\.1"):
            _ = memory.area
    finally:
        memory.close()


def refuse_memfds(patch: pytest.MonkeyPatch, call: str = "memfd_create", number: int = errno.EPERM) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    patch.setattr(os, call, refuse)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("memfd_create", errno.EMFILE),
        ("memfd_create", errno.ENFILE),
        ("memfd_create", errno.EPERM),
        ("memfd_create", errno.ENOSYS),
        ("ftruncate", errno.EFBIG),  # RLIMIT_FSIZE
    ],
)
def test_without_a_memfd_it_is_private_memory_and_not_shared(
    monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    refuse_memfds(monkeypatch, call, number)
    memory = PoolMemory(MIB, 1 << 20)
    try:
        assert memory.address % MIB == 0 and memory.fd < 0 and not mappings()
        whole = bytes_at(memory.address, MIB)
        assert not whole.any()
        whole[-1] = 7
        with pytest.raises(NotSharable, match=f"memory that can be shared: .*{os.strerror(number)}") as told:
            _ = memory.area
        assert isinstance(told.value.__cause__, OSError) and told.value.__cause__.errno == number
        del whole
    finally:
        memory.close()
    memory.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_memfd_on_a_kernel_that_does_not_know_the_newest_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.memfd_create, []

    def older(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & ~3:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    PoolMemory(MIB, 1 << 16).close()
    assert len(asked) == 2 and asked[1] == os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_forked_child_sees_zeros_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    if not is_shared:
        refuse_memfds(monkeypatch)
    memory = PoolMemory(MIB, 1 << 16)
    mine = bytes_at(memory.address, MIB)
    mine[:] = 3
    pid = os.fork()
    if not pid:
        memory.leave_to_parent()
        code = 0 if not mine.any() and not mappings() and memory.fd < 0 else 1
        mine[:] = 9
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (mine == 3).all()
    del mine
    memory.close()


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(MemoryError, match=rf"{1 << 60} bytes are asked for, \d+ are available"):
        PoolMemory(1 << 60, 1 << 16)
    assert not mappings()


def test_what_the_system_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(pool_memory, "map_memory", refuse)
    with pytest.raises(OSError, match="Cannot allocate"):
        PoolMemory(MIB, 1 << 16)
    assert set(os.listdir("/proc/self/fd")) == before


def machine(root: Path, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    given = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1000 kB\nSwapFree: 24 kB\nHugePages_Total:  0\n"
    }
    given |= {"proc/self/cgroup": cgroup} | (files or {})
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "sys/fs/cgroup/a/b/memory."
V1 = "sys/fs/cgroup/memory/c/memory."


@pytest.mark.parametrize(
    ("cgroup", "files", "nbytes"),
    [
        ("", {}, 1024 * 1024),
        ("0::/a/b\n", {V2 + "max": "max\n", V2 + "current": "5\n"}, 1024 * 1024),
        ("0::/a/b\n", {V2 + "max": "5000\n", V2 + "current": "3000\n"}, 2000),
        (
            "0::/a/b\n",
            {V2 + "max": "5000\n", V2 + "current": "3000\n", V2 + "stat": "anon 1\ninactive_file 700\n"},
            2700,
        ),
        ("0::/a/b\n", {V2 + "max": "5000\n", V2 + "current": "6000\n"}, 0),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/memory.max": "400\n", "sys/fs/cgroup/a/memory.current": "100\n"},
            300,
        ),
        ("3:cpu:/x\n2:memory:/c\n", {V1 + "limit_in_bytes": "900\n", V1 + "usage_in_bytes": "100\n"}, 800),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "70\n", "sys/fs/cgroup/memory.current": "0\n"}, 70),
    ],
)
def test_available_is_what_system_and_cgroups_leave(
    cgroup: str, files: dict[str, str], nbytes: int, tmp_path: Path
) -> None:
    assert available_nbytes(machine(tmp_path, cgroup, files)) == nbytes


def test_available_on_this_machine() -> None:
    assert 0 < available_nbytes() < 1 << 50


def _virtual_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
