"""Memory of a pool: a memfd mapped here, so that a peer on the same host can be given it; private without a memfd.

Pages are made by the system when first touched, and are zero then. A size that the machine does not have
is refused here: touched later, it would end the process. A forked child sees zeros in its place, and keeps
none of it alive.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from llm_datadist._shortages import is_shortage
from llm_datadist.devices.mapping import (
    FIXED,
    NO_RESERVE,
    PRIVATE,
    PROT_NONE,
    READ_WRITE,
    WIPE_ON_FORK,
    advise,
    map_memory,
    unmap,
)
from llm_datadist.devices.shared_memory import NotSharable, SharedArea, create_memfd, seal


class PoolMemory:
    """One mapping of ``nbytes`` at an address that is a multiple of ``alignment`` (a power of two).

    Attributes:
        address: Where it begins.
        fd: The memfd behind it; -1 if there is none.

    Raises:
        MemoryError: The machine does not have so much; the text says how much it has.
        OSError: The system refuses the mapping.
    """

    def __init__(self, nbytes: int, alignment: int) -> None:
        available = available_nbytes()
        if nbytes > available:
            raise MemoryError(f"{nbytes} bytes are asked for, {available} are available on this machine")
        self.nbytes = nbytes
        self.address = 0
        self.fd = -1
        self._refused: OSError | None = None
        self._unsealed = ""
        try:
            self.fd = create_memfd("llm-datadist-pool", nbytes)
        except OSError as exc:  # its memory can be had all the same
            self._refused = exc.with_traceback(None)
        try:
            self.address = _reserve(nbytes, alignment)
            if self._refused is None:
                map_memory(self.address, nbytes, READ_WRITE, mmap.MAP_SHARED | FIXED, self.fd)
                self._unsealed = seal(self.fd)
            else:
                map_memory(self.address, nbytes, READ_WRITE, PRIVATE | FIXED | NO_RESERVE, -1)
                with contextlib.suppress(OSError):
                    advise(self.address, nbytes, WIPE_ON_FORK)
        except BaseException:
            self.close()
            raise

    @property
    def area(self) -> SharedArea:
        """What a peer may be given, until the descriptor is closed.

        Raises:
            NotSharable: Nothing; the text says why. Caused by what the system refused, if it did.
        """
        if self._refused is not None:
            raise NotSharable(
                f"this system gives no memory that can be shared: {self._refused}"
            ) from self._refused
        if self._unsealed:
            raise NotSharable(self._unsealed)
        return SharedArea(self.address, self.nbytes, self.fd)

    def close(self) -> None:
        """Unmaps it. Idempotent."""
        if self.address:
            unmap(self.address, self.nbytes)
            self.address = 0
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Closes the descriptor alone; the memory stays as long as it is mapped."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def leave_to_parent(self) -> None:
        """In a forked child: puts private zeros in its place, so that nothing here can change or keep the pool."""
        with contextlib.suppress(OSError):  # without memory for it the mapping stays; nothing of ours uses it
            map_memory(self.address, self.nbytes, READ_WRITE, PRIVATE | FIXED | NO_RESERVE, -1)
        self.close_descriptor()


def available_nbytes(root: Path = Path("/")) -> int:
    """Memory that this process could still take: by the system, and by its cgroups where they have limits.

    Args:
        root: Where /proc and /sys are, for tests.
    """
    known = _numbers(root / "proc/meminfo", ":", 1024)
    found = [known.get("MemAvailable", 0) + known.get("SwapFree", 0)]
    for folder, limit, usage in _cgroups(root):
        try:
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
        except (OSError, ValueError) as exc:  # not there, or "max"
            if is_shortage(exc):
                raise
            continue
        # The page cache of files counts as used, but gives way.
        stat = _numbers(folder / "memory.stat", " ", 1)
        found.append(max(0, room + stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return min(found)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """This process's cgroup and all above it (v2), or of the memory controller (v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as exc:
        if is_shortage(exc):
            raise
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        path = Path(name.lstrip("/"))
        for folder in dict.fromkeys((path, *path.parents)):
            if not controllers:
                yield root / "sys/fs/cgroup" / folder, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory" / folder
                yield base, "memory.limit_in_bytes", "memory.usage_in_bytes"


def _numbers(path: Path, separator: str, unit: int) -> dict[str, int]:
    """Lines of ``name<separator>number``; OSError: there is no descriptor to read them with."""
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        if is_shortage(exc):
            raise
        return {}
    pairs = (line.partition(separator) for line in lines)
    return {name: int(rest.split()[0]) * unit for name, _, rest in pairs if rest.split()[:1]}


def _reserve(nbytes: int, alignment: int) -> int:
    """Address space of ``nbytes`` at a multiple of ``alignment``; what surrounds it is given back."""
    page = mmap.PAGESIZE
    nbytes = -(-nbytes // page) * page
    whole = nbytes + alignment
    low = map_memory(None, whole, PROT_NONE, PRIVATE | NO_RESERVE, -1)
    address = -(-low // alignment) * alignment
    for start, stop in ((low, address), (address + nbytes, low + -(-whole // page) * page)):
        if stop > start:
            unmap(start, stop - start)
    return address
