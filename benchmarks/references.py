"""The references: what the machine needs for the same bytes without any of our code around it."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_IOV_MAX = 1024
_CALL_NBYTES = 16 << 20
_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def plain_copy(nbytes: int) -> Callable[[], object]:
    """One contiguous copy within this process, one thread: the machine's limit."""
    source, destination = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda: np.copyto(destination, source)


def bare_readv(
    pid: int, pairs: tuple[NDArray[np.uint64], NDArray[np.uint64]], threads: int
) -> Callable[[], object]:
    """``process_vm_readv`` alone, over iovecs built beforehand: (destination, source), (n, 2) each."""
    parts = [tuple(np.array_split(side, threads)) for side in pairs]
    work = [_cut(d, s) for d, s in zip(*parts, strict=True)]

    def run_one(calls: list[tuple[int, int, int]]) -> None:
        for destination, source, count in calls:
            if _readv(pid, destination, count, source, count, 0) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def run() -> object:
        helpers = [threading.Thread(target=run_one, args=(calls,)) for calls in work[1:]]
        for helper in helpers:
            helper.start()
        run_one(work[0])
        for helper in helpers:
            helper.join()
        return parts  # keeps the arrays alive

    return run


def _cut(destination: NDArray[np.uint64], source: NDArray[np.uint64]) -> list[tuple[int, int, int]]:
    """Calls (destination iovecs, source iovecs, count) of at most 1,024 iovecs and about 16 MiB."""
    step = max(1, min(_IOV_MAX, _CALL_NBYTES // int(destination[0, 1])))
    at = range(0, len(destination), step)
    return [
        (destination.ctypes.data + 16 * i, source.ctypes.data + 16 * i, min(step, len(destination) - i))
        for i in at
    ]


def raw_tcp(port: int, nbytes: int) -> Callable[[], object]:
    """One byte out, ``nbytes`` back over one plain connection into one contiguous buffer."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(bytearray(nbytes))

    def run() -> None:
        sock.sendall(b"?")
        got = 0
        while got < nbytes:
            got += sock.recv_into(view[got:])

    return run
