"""The owner's side of a conformance pair as a real process: memory that a test can fill, unmap and kill.

Strategy: the child runs ``serve`` and answers one JSON line per command line; a transport adds commands
of its own (say, ``endpoint``) by giving ``serve`` more handlers. The child ends with its standard input.
Thread rule: one command at a time, from one thread of the test.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Handler = Callable[..., Any]


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes that tensor ``seed`` holds in every process: reproducible, without a period."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Memory:
    """Mappings of this process, made and unmade by address."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._mapped: dict[int, int] = {}  # start -> end

    def allocate(self, sizes: Sequence[int], seed: int) -> list[int]:
        """Maps one region per tensor and fills tensor i with ``pattern(seed + i, sizes[i])``."""
        addresses = [self.map_sparse(size) for size in sizes]
        for i, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            self.write(address, pattern(seed + i, size).tobytes())
        return addresses

    def map_sparse(self, nbytes: int) -> int:
        """Maps zeros that take no memory until they are touched."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        address = self._libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes")
        self._mapped[address] = address + _whole_pages(nbytes)
        return int(address)

    def write(self, address: int, data: bytes) -> None:
        """Stores bytes at an address."""
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Loads bytes from an address."""
        return ctypes.string_at(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes whole pages away, as far as they are still there.

        Pages that went before may be anybody's by now: the allocator's, or a thread's stack.
        """
        stop = address + _whole_pages(nbytes)
        for low, high in list(self._mapped.items()):
            first, last = max(low, address), min(high, stop)
            if first >= last:
                continue
            self._check(self._libc.munmap(first, last - first))
            del self._mapped[low]
            if low < first:
                self._mapped[low] = first
            if last < high:
                self._mapped[last] = high

    def protect(self, address: int, nbytes: int, rights: str) -> None:
        """Gives whole pages the rights "rw", "r" or none at all: ""."""
        flags = (mmap.PROT_READ if "r" in rights else 0) | (mmap.PROT_WRITE if "w" in rights else 0)
        self._check(self._libc.mprotect(address, nbytes, flags))

    def drop(self, address: int, nbytes: int) -> None:
        """Gives the content of whole pages away: they are zeros, and take no memory, until written."""
        self._check(self._libc.madvise(address, nbytes, mmap.MADV_DONTNEED))

    def resident_pages(self, address: int, nbytes: int) -> int:
        """How many of the pages take memory."""
        pages = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
        self._check(self._libc.mincore(address, nbytes, pages))
        return sum(page & 1 for page in pages)

    def close(self) -> None:
        """Unmaps whatever is left."""
        for low, high in list(self._mapped.items()):
            self.unmap(low, high - low)

    def _check(self, result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def serve(handlers: Mapping[str, Handler] | None = None) -> None:
    """Answers commands on standard input until it ends: the main program of an owner process."""
    memory = Memory()
    table: dict[str, Handler] = {
        "allocate": memory.allocate,
        "map_sparse": memory.map_sparse,
        "write": lambda address, data: memory.write(address, bytes.fromhex(data)),
        "unmap": memory.unmap,
        **(handlers or {}),
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": table[command["do"]](**command["args"])}
        except Exception as exc:  # the test must see it, whatever it is
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


class OwnerProcess:
    """An owner in a process of its own.

    Args:
        argv: What to run; by default a plain owner (``python -m llm_datadist.testing.owner``).
        popen: Further arguments of ``subprocess.Popen`` (another user id, an environment).
    """

    def __init__(self, argv: Sequence[str] | None = None, **popen: Any) -> None:
        self._process = subprocess.Popen(
            argv or [sys.executable, "-m", "llm_datadist.testing.owner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def call(self, do: str, **args: Any) -> Any:
        """Runs one command in the child and returns its answer."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, "args": args}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.close()  # also where nobody holds it yet: what could not be started leaves nothing behind
        answer = json.loads(line or '{"error": "the owner process has ended"}')
        if "error" in answer:
            raise RuntimeError(f"owner process, {do}: {answer['error']}")
        return answer["ok"]

    def allocate(self, sizes: Sequence[int], seed: int) -> list[int]:
        """See ``Memory.allocate``."""
        return list(self.call("allocate", sizes=list(sizes), seed=seed))

    def map_sparse(self, nbytes: int) -> int:
        """See ``Memory.map_sparse``."""
        return int(self.call("map_sparse", nbytes=nbytes))

    def write(self, address: int, data: bytes) -> None:
        """See ``Memory.write``."""
        self.call("write", address=address, data=data.hex())

    def unmap(self, address: int, nbytes: int) -> None:
        """See ``Memory.unmap``; nothing when the process has ended, and its memory with it."""
        if self._process.poll() is None:
            self.call("unmap", address=address, nbytes=nbytes)

    def stop(self) -> None:
        """Stops the process (SIGSTOP) and waits until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets it run again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills and reaps it."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Ends the child and frees its pipes. Idempotent."""
        if self._process.stdin and self._process.stdin.closed:
            return
        if self._process.poll() is None:
            self.resume()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    serve()
