"""A system that refuses: the k-th thing that this process asks it for, or all from there on.

Things are threads, descriptors of every kind, memory, and room in an epoll set. So that each place of an operation
at which something can be refused is tried once: k = 1, 2, 3, ... until the operation ends undisturbed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import itertools
import mmap
import os
import resource
import select
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import _accepting
from llm_datadist.devices import mapping
from llm_datadist.transports import shm_memory

LIMITS = r"RLIMIT_NOFILE|RLIMIT_NPROC|RLIMIT_AS|fs\.file-max|max_user_watches"
MOST = 200  # things that one operation asks for; far above any

# What asks for one descriptor, beside sockets: where it is found, and its name there.
_DESCRIPTORS: tuple[tuple[Any, str], ...] = (
    (os, "dup"),
    (os, "eventfd"),
    (os, "memfd_create"),
    (os, "open"),
    (os, "pidfd_open"),
    (os, "pipe"),
    (select, "epoll"),
)
_LIBC_MMAP: Any = vars(mapping)["_LIBC"].mmap


class Shortage:
    """Refuses while it is entered.

    Args:
        first: The number of the thing that is refused, from 1.
        lasting: And all after it.
        number: The errno for descriptors.

    Attributes:
        asked: What was asked for.
        refused: What of it was refused.
    """

    def __init__(self, first: int, *, lasting: bool = False, number: int = errno.EMFILE) -> None:
        self._first, self._lasting, self._number = first, lasting, number
        self._lock = threading.Lock()
        self._over = False
        self._free = 0  # descriptors that a spare has left
        self._patch = pytest.MonkeyPatch()
        self.asked: list[str] = []
        self.refused: list[str] = []

    def __enter__(self) -> Shortage:
        for module, name in _DESCRIPTORS:
            self._patch.setattr(module, name, self._guarded(name, getattr(module, name)))
        for module in (builtins, io):
            self._patch.setattr(module, "open", self._guarded("open", module.open))
        self._patch_sockets()
        self._patch_threads()
        self._patch_memory()
        self._patch_spares()
        self._patch.setattr(selectors.EpollSelector, "_selector_cls", staticmethod(select.epoll))
        self._patch.setattr(select, "epoll", self._epoll(select.epoll))
        self._patch_selectors()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self._over = True  # for what was made meanwhile, and stays

    def refuses(self, kind: str) -> bool:
        """Whether the next thing of that kind is refused."""
        with self._lock:
            if self._over:
                return False
            self.asked.append(kind)
            count = len(self.asked)
            now = count >= self._first if self._lasting else count == self._first
            if now:
                self.refused.append(kind)
            return now

    def _ask(self, kind: str, number: int | None = None) -> None:
        if self.refuses(kind):
            number = number or self._number
            raise OSError(number, os.strerror(number))

    def _guarded(self, kind: str, call: Callable[..., Any], number: int | None = None) -> Callable[..., Any]:
        def guarded(*args: Any, **named: Any) -> Any:
            self._ask(kind, number)
            return call(*args, **named)

        return guarded

    def _patch_sockets(self) -> None:
        begin, accept, look = socket.socket.__init__, socket.socket._accept, shm_memory.look  # type: ignore[attr-defined]

        def made(sock: socket.socket, *args: Any, **named: Any) -> None:
            if named.get("fileno") is None:
                self._ask("socket")
            begin(sock, *args, **named)

        def accepted(sock: socket.socket) -> Any:
            if select.select([sock], [], [], 0)[0] and not self._takes_free():
                self._ask("accept")
            return accept(sock)

        def looked(sock: socket.socket) -> tuple[bytes, list[int], bool]:
            message, fds, truncated = look(sock)
            while fds and self.refuses("received"):
                os.close(fds.pop())
                truncated = True
            return message, fds, truncated

        self._patch.setattr(socket.socket, "__init__", made)
        self._patch.setattr(socket.socket, "_accept", accepted, raising=False)
        self._patch.setattr(shm_memory, "look", looked)

    def _patch_spares(self) -> None:
        """A spare descriptor that is closed leaves room for one, and for itself again."""
        make = self._guarded("FileIO", io.FileIO)

        def spare(path: str) -> Any:
            return io.FileIO(path) if self._takes_free() else make(path)

        self._patch.setattr(_accepting, "FileIO", spare)
        close = _accepting.Accepting.close

        def closed(accepting: Any) -> None:
            if accepting._spare is not None:
                self._free = 2
            close(accepting)

        self._patch.setattr(_accepting.Accepting, "close", closed)

    def _patch_selectors(self) -> None:
        """What is unregistered leaves room for what is registered next."""
        register, unregister = selectors.EpollSelector.register, selectors.EpollSelector.unregister
        guarded, left = self._guarded("watch", register, errno.ENOSPC), Counter[int]()

        def registered(*args: Any) -> Any:
            if not left[id(args[0])]:
                return guarded(*args)
            left[id(args[0])] -= 1
            return register(*args)

        def unregistered(*args: Any) -> Any:
            key = unregister(*args)
            left[id(args[0])] += 1
            return key

        self._patch.setattr(selectors.EpollSelector, "register", registered)
        self._patch.setattr(selectors.EpollSelector, "unregister", unregistered)

    def _takes_free(self) -> bool:
        with self._lock:
            taken = self._free > 0
            self._free -= taken
            return taken

    def _patch_threads(self) -> None:
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            if thread.name.startswith("llm") and self._counts(thread) and self.refuses("thread"):
                raise RuntimeError("can't start new thread")
            start(thread)

        self._patch.setattr(threading.Thread, "start", started)

    def _counts(self, thread: threading.Thread) -> bool:
        """Workers that get none for good only let the other side wait until its time is over."""
        return not (self._lasting and "worker" in thread.name)

    def _patch_memory(self) -> None:
        map_one = mmap.mmap

        def mapped(*args: Any) -> Any:
            if self.refuses("mmap"):
                ctypes.set_errno(errno.ENOMEM)
                return ctypes.c_void_p(-1).value
            return _LIBC_MMAP(*args)

        def mapped_one(*args: Any, **named: Any) -> Any:
            self._ask("mmap", errno.ENOMEM)
            return map_one(*args, **named)

        self._patch.setattr(vars(mapping)["_LIBC"], "mmap", mapped)
        self._patch.setattr(mmap, "mmap", mapped_one)

    def _epoll(self, make: Callable[[], Any]) -> Callable[[], Any]:
        ask = self._ask

        class Epoll:
            def __init__(self) -> None:
                self._real = make()

            def register(self, *args: Any) -> None:
                ask("watch", errno.ENOSPC)
                self._real.register(*args)

            def modify(self, *args: Any) -> None:
                self._real.modify(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

        return Epoll


def shortages(**how: Any) -> Iterator[Shortage]:
    """One for each thing that the operation asks for, until it has asked for less than that.

    The caller enters each, does its operation in it, and judges what came of it. The last one refuses nothing.
    """
    for first in itertools.count(1):
        assert first < MOST, "the operation asks for ever more"
        shortage = Shortage(first, **how)
        yield shortage
        if not shortage.refused:
            return


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Really none but so many: by the limit of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
