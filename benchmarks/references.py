"""The references: what the machine needs for the same bytes without any of our code around it.

Everything that can be prepared is prepared before the clock starts.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], object]

_IOV_MAX = 1024
_MSG_BUFFERS = 64  # of one sendmsg or recvmsg: about what a socket takes at once
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


class Crew:
    """Threads that share a list of calls with their caller, each taking the next one."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._helpers = [threading.Thread(target=self._help, daemon=True) for _ in range(threads - 1)]
        for helper in self._helpers:
            helper.start()

    def run(self, calls: Sequence[Call]) -> None:
        left = iter(calls)

        def work() -> None:
            for call in left:  # an iterator of a list hands each item out once, whoever asks
                call()

        for _ in self._helpers:
            self._jobs.put(work)
        work()
        for _ in self._helpers:
            if (problem := self._done.get()) is not None:
                raise problem

    def close(self) -> None:
        for _ in self._helpers:
            self._jobs.put(None)
        for helper in self._helpers:
            helper.join()

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as exc:
                self._done.put(exc)
            else:
                self._done.put(None)


def iovecs(bases: Sequence[int], blocks: Sequence[int], block_nbytes: int) -> NDArray[np.uint64]:
    """One (address, length) per block of each tensor."""
    table = np.empty((len(bases), len(blocks), 2), np.uint64)
    offsets = np.array(blocks, np.uint64) * np.uint64(block_nbytes)
    table[:, :, 0] = np.array(bases, np.uint64)[:, None] + offsets
    table[:, :, 1] = block_nbytes
    return table.reshape(-1, 2)


def readv(pid: int, destination: NDArray[np.uint64], source: NDArray[np.uint64], crew: Crew) -> Call:
    """``process_vm_readv`` alone, over iovecs built beforehand, in calls of at most 1,024 and 16 MiB."""
    step = max(1, min(_IOV_MAX, _CALL_NBYTES // int(destination[0, 1])))
    calls = [
        _one_readv(pid, destination[i : i + step], source[i : i + step]) for i in range(0, len(source), step)
    ]
    return lambda: crew.run(calls)


def _one_readv(pid: int, destination: NDArray[np.uint64], source: NDArray[np.uint64]) -> Call:
    here, there, count = destination.ctypes.data, source.ctypes.data, len(source)
    expected = int(source[:, 1].sum())

    def call() -> None:
        got = _readv(pid, here, count, there, count, 0)
        if got != expected:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_readv copied {got} bytes of {expected}: {os.strerror(number)}")

    call.keeps = destination, source  # type: ignore[attr-defined]
    return call


def indexed_copy(
    destinations: Sequence[NDArray[np.uint8]],
    sources: Sequence[NDArray[np.uint8]],
    destination_blocks: NDArray[np.int64],
    source_blocks: NDArray[np.int64],
    crew: Crew,
) -> Call:
    """``dst[di] = src[si]`` on (blocks, bytes) arrays of one process, tensor by tensor."""

    def copy(dst: NDArray[np.uint8], src: NDArray[np.uint8]) -> Call:
        def call() -> None:
            dst[destination_blocks] = src[source_blocks]

        return call

    calls = [copy(dst, src) for dst, src in zip(destinations, sources, strict=True)]
    return lambda: crew.run(calls)


def plain_copy(nbytes: int, crew: Crew, threads: int) -> Call:
    """One contiguous copy within this process, split over the threads: the machine's limit."""
    source, destination = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    parts = zip(np.array_split(destination, threads), np.array_split(source, threads), strict=True)
    calls = [(lambda d=d, s=s: np.copyto(d, s)) for d, s in parts]
    return lambda: crew.run(calls)


def raw_tcp(port: int, nbytes: int) -> Call:
    """One byte out, ``nbytes`` back over one plain connection into one contiguous buffer."""
    view = np.ones(nbytes, np.uint8).data
    sock = _connect(port)

    def run() -> None:
        sock.sendall(b"?")
        got = 0
        while got < nbytes:
            got += sock.recv_into(view[got:])

    return run


def scattered_tcp(port: int, blocks: Sequence[memoryview]) -> Call:
    """One byte out, the blocks back over one plain connection, each to its place by ``recvmsg_into``."""
    sock = _connect(port)

    def run() -> None:
        sock.sendall(b"?")
        in_calls(lambda some: sock.recvmsg_into(some)[0], blocks)

    return run


def in_calls(move: Callable[[list[memoryview]], int], blocks: Sequence[memoryview]) -> None:
    """Moves blocks in order by calls that take a list of buffers and tell how many bytes they did."""
    at, skip = 0, 0
    while at < len(blocks):
        some = list(blocks[at : at + _MSG_BUFFERS])
        some[0] = some[0][skip:]
        done = move(some) + skip
        while at < len(blocks) and done >= len(blocks[at]):
            done -= len(blocks[at])
            at += 1
        skip = done


def _connect(port: int) -> Any:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
