"""``process_vm_readv`` and its small print: the only place of the one-sided transports that calls into C.

Invariant: a bad address, ours or the peer's, is an answer (EFAULT), never a signal.
Threads: all functions may be called from any thread; the GIL is free during each call that moves bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from llm_datadist._core.segments import U64, Extents

_LOOK_NBYTES = 1 << 20
IOV_MAX = 1024  # UIO_MAXIOV: iovecs that the kernel takes per side of one call

_PR_SET_PTRACER = 0x59616D61  # "Yama" in <linux/prctl.h>
_PR_SET_PTRACER_ANY = -1
_libc = ctypes.CDLL(None, use_errno=True)

_readv: Any = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_prctl: Any = _libc.prctl
_prctl.restype = ctypes.c_int
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

_poll_now: Any = ctypes.PyDLL(None).poll
_poll_now.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
# The same without types: for arguments that are made once, and fit.
_poll_again: Any = ctypes.PyDLL(None)["poll"]
_readv_again: Any = ctypes.CDLL(None)["process_vm_readv"]
_readv_again.restype = ctypes.c_ssize_t


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_FourWords = ctypes.c_uint64 * 4
_FiveWords = ctypes.c_uint64 * 5


def read_pairs(pid: int, destination: U64, source: U64) -> int:
    """One call: from the source iovecs of ``pid`` to ours, until the shorter side is used up.

    Args:
        pid: Whose memory is read; our own is allowed.
        destination: (n, 2) uint64 rows of (address, nbytes) here, n at most IOV_MAX.
        source: The same there.

    Returns:
        Bytes copied, or minus an errno if there were none.
    """
    done: int = _readv(pid, destination.ctypes.data, len(destination), source.ctypes.data, len(source), 0)
    return done if done >= 0 else -ctypes.get_errno()


def repeated_read(pid: int, destination: U64, source: U64) -> Callable[[], int]:
    """``read_pairs`` of the same two arrays, whose contents may change from call to call; whoever calls keeps them.

    Args:
        pid: Whose memory is read; our own is allowed.
        destination: (n, 2) uint64 rows of (address, nbytes) here, n at most IOV_MAX.
        source: The same there.

    Returns:
        Makes one call; bytes copied, or -1 if there were none.
    """
    return partial(
        _readv_again, ctypes.c_int(pid),
        ctypes.c_void_p(destination.ctypes.data), ctypes.c_ulong(len(destination)),
        ctypes.c_void_p(source.ctypes.data), ctypes.c_ulong(len(source)),
        ctypes.c_ulong(0),
    )  # fmt: skip


def read_one(pid: int, destination: int, source: int, nbytes: int) -> int:
    """The same for one range: as little Python as there can be."""
    words = _FourWords(destination, nbytes, source, nbytes)
    at = ctypes.addressof(words)
    done: int = _readv(pid, at, 1, at + 16, 1, 0)
    return done if done >= 0 else -ctypes.get_errno()


def read_u64(pid: int, address: int) -> int:
    """The 8 bytes at ``address`` of ``pid`` as a uint64, or minus an errno."""
    words = _FiveWords(0, 0, 8, address, 8)
    at = ctypes.addressof(words)
    words[1] = at
    done: int = _readv(pid, at + 8, 1, at + 24, 1, 0)
    if done == 8:
        return words[0]
    return -ctypes.get_errno() if done < 0 else -errno.EFAULT


def has_news(fd: int, events: int) -> bool:
    """Whether ``poll`` tells one of these events of a descriptor now, or its end.

    Keeps the GIL, for it cannot block: beside a thread that runs Python without a pause, whoever gives
    the GIL away waits 5 ms to have it back.
    """
    asked = _PollFd(fd, events, 0)
    told: int = _poll_now(ctypes.byref(asked), 1, 0)
    return told > 0


def repeated_news(fd: int, events: int) -> Callable[[], int]:
    """``has_news`` of the same descriptor, asked again and again, from any thread: how many there are, 0 or 1."""
    asked = (_PollFd * 1)(_PollFd(fd, events, 0))
    return partial(_poll_again, asked, ctypes.c_ulong(1), ctypes.c_int(0))


def can_write_byte(address: int) -> bool:
    """Whether the kernel can store to our own ``address``: tried with the byte that is there.

    Only for a byte that a read of ours was about to overwrite anyhow.
    """
    return read_one(os.getpid(), address, address, 1) != -errno.EFAULT


def first_unreadable(extents: Extents, at: int) -> int:
    """The first byte of a stream of ours, from ``at``, that cannot be read; ``at`` if that cannot be told.

    Looks as far as a call that has failed may have come.
    """
    room = np.empty(_LOOK_NBYTES, dtype=np.uint8)
    there, nbytes = extents.take_pairs(at, _LOOK_NBYTES, IOV_MAX)
    here = np.array([[room.ctypes.data, nbytes]], dtype=np.uint64)
    read = read_pairs(os.getpid(), here, there)
    return at + read if 0 < read < nbytes else at


def can_read_own() -> bool:
    """Whether this process may use ``process_vm_readv`` on itself; a seccomp profile may forbid it."""
    words = _FourWords(0, 0, 0, 0)
    at = ctypes.addressof(words)
    return read_one(os.getpid(), at, at + 16, 8) == 8


def allow_any_tracer() -> None:
    """Lets any process of the same user read this one under Yama's ptrace_scope 1; without Yama, nothing."""
    _prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
