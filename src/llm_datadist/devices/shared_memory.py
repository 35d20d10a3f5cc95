"""Memory that a peer on the same host may be given to read: a memfd, sealed once its owner has mapped it.

Invariants: whoever holds the descriptor can neither write the memory nor change its size (a reader cannot
be ended by SIGBUS, an owner's bytes cannot be changed); the mapping made before the seals stays writable.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass

# <linux/fcntl.h>; FUTURE_WRITE is of Linux 5.1, and in no Python before 3.13.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE, SEAL_FUTURE_WRITE = 1, 2, 4, 8, 16
_NO_EXEC_SEAL = 8  # MFD_NOEXEC_SEAL, Linux 6.3: required where vm.memfd_noexec is 2


class NotSharable(Exception):  # noqa: N818 - a fact about the machine, not an error of the caller
    """This memory cannot be given to a peer; the text says why."""


@dataclass(frozen=True, slots=True)
class SharedArea:
    """Memory of ours that a peer may map.

    Attributes:
        address: Where it begins here.
        nbytes: Its size.
        fd: The sealed memfd behind it, open as long as its owner says.
    """

    address: int
    nbytes: int
    fd: int


def create_memfd(name: str, nbytes: int) -> int:
    """A memfd of ``nbytes`` zeros, which take no memory until they are touched.

    Raises:
        OSError: The system refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _NO_EXEC_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> str:
    """Seals a memfd that its owner has mapped; returns why it could not, or ""."""
    try:
        fcntl.fcntl(fd, _ADD_SEALS, SEAL_SHRINK | _SEAL_GROW | SEAL_FUTURE_WRITE | _SEAL_SEAL)
    except OSError as exc:
        return f"the kernel cannot seal memory for readers ({exc}); that needs Linux 5.1"
    return ""


def is_safe_to_map(fd: int) -> bool:
    """Whether a descriptor of a peer is memory that nobody can shrink or map for writing any more."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:  # not a memfd
        return False
    return bool(seals & SEAL_SHRINK) and bool(seals & (SEAL_FUTURE_WRITE | _SEAL_WRITE))
