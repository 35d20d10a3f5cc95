"""NVIDIA NIXL's agent behind a small interface: the only module that touches the package.

Strategy: the bindings are used directly, because the public class decides two things otherwise: its progress
thread never sleeps (a core of CPU when idle; here it waits for events), and importing it sets up the
process's logging anew. An agent that serves has that thread: peers that connect, or read over TCP, need
it. One that reads is driven by the calls of its user.
Invariants: nothing is imported or read from the environment before ``agents()``. An agent is destroyed by
``close`` alone, never by the garbage collector: in a forked child its threads are missing. What an interrupted
``close`` has begun, the next one ends.
Threads: a reading agent takes one call at a time (``Session`` sees to it), a serving one any number.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import filterfalse, repeat
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.transports.seam import TransportUnavailable

INSTALL = "pip install --no-deps nixl-cu12 (or nixl-cu13); its torch is not needed"
_NOT_INSTALLED = f"NIXL is not installed: {INSTALL}"
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_SEGMENTS = {"host": "DRAM_SEG", "cuda": "VRAM_SEG"}  # of ``Region.memory``, without ":device"
_MEMORY = re.compile(r"host|cuda(:[0-9]{1,4})?")
_CONNECT = "UCX_TCP_CONN_NB"
_MEANS = "UCX_TLS"
_PROGRESS_WAIT_US = 500_000  # longest sleep of the serving thread; events wake it at once
# Of this module, which says what they take; what they do is done when the interpreter looks for signals.
_PYTHON = ctypes.PyDLL(None)
_keep: Any = _PYTHON.Py_IncRef
_let_go: Any = _PYTHON.Py_DecRef
_keep.argtypes = _let_go.argtypes = [ctypes.py_object]
_keep.restype = _let_go.restype = None


class NixlLost(Exception):  # noqa: N818 - an answer
    """The connection to the peer has ended: the peer is gone, or UCX could not read or write some memory."""


class NixlRefused(Exception):  # noqa: N818 - an answer
    """NIXL does not do that; the text says what."""


class Agent(Protocol):
    """One NIXL agent. ``memory`` is what ``Region.memory`` says; rows are (start, end)."""

    name: str

    def register(self, memory: str, rows: U64) -> None:
        """Makes memory known."""

    def deregister(self, memory: str, rows: U64) -> None:
        """Forgets what was registered with the same rows."""

    def metadata(self, memory: str, rows: U64, connection: bool) -> bytes:
        """What lets a peer read registered rows, and with ``connection`` also find us."""

    def load(self, metadata: bytes) -> None:
        """Takes a peer's metadata."""

    def make(self, peer: str, there: tuple[str, U64], here: tuple[str, U64], nbytes: U64) -> int:
        """Makes a transfer that reads pieces.

        Args:
            peer: Name of the agent that is read.
            there: Its memory, and the address of each piece.
            here: Ours.
            nbytes: Bytes of each piece.
        """

    def post(self, transfer: int) -> bool:
        """Begins a transfer that is not under way; whether it has ended already, and well."""

    def ended(self, transfer: int) -> bool:
        """Whether a transfer has ended well; makes it go on otherwise."""

    def release(self, transfer: int) -> None:
        """Frees a transfer that has ended. One that has not would go on writing."""

    def close(self, ended: list[int]) -> None:
        """Destroys the agent: its connections end, and nothing is written any more. Idempotent.

        Args:
            ended: Transfers to free before, none of them under way; what has been freed is taken out.
        """


class Agents(Protocol):
    """Makes agents."""

    def __call__(self, name: str, serving: bool, within_host: bool) -> Agent:
        """One of that name.

        Args:
            name: Its name.
            serving: Whether peers read from it.
            within_host: Whether it may use what processes of one host share.
        """


def agents() -> Agents:
    """Finds NIXL.

    Raises:
        TransportUnavailable: It is not installed, or cannot be loaded.
    """
    return partial(_Agent, _bindings())


def check_installed() -> None:
    """Looks for the package without loading it.

    Raises:
        TransportUnavailable: It is not there.
    """
    if not any(importlib.util.find_spec(package) for package in _PACKAGES):
        raise TransportUnavailable(_NOT_INSTALLED)


def knows(memory: str) -> bool:
    """Whether there is a NIXL memory type for it."""
    return _MEMORY.fullmatch(memory) is not None


def _bindings() -> ModuleType:
    torch: Any = sys.modules.get("torch")  # its CUDA decides, where there is one; it is never imported
    wanted = f"nixl_cu{str(getattr(torch.version, 'cuda', None)).split('.')[0]}" if torch else ""
    failures = []
    for package in sorted(_PACKAGES, key=lambda name: name != wanted):
        try:
            found = _load(package)
        except Exception as exc:
            failures.append(f"NIXL ({package}) cannot be loaded: {_text(exc)}")
        else:
            if found is not None:
                return found
    raise TransportUnavailable("; ".join(failures) or _NOT_INSTALLED)


def _load(package: str) -> ModuleType | None:
    """The extension module alone: its package replaces the handlers of ``logging`` when it is imported.

    It gets the name that it would have there, so that whoever imports the package later finds this one:
    it can be loaded once per process.
    """
    name = f"{package}._bindings"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    finder = importlib.machinery.FileFinder(
        str(next(iter(spec.submodule_search_locations or ()), "")),
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    )
    found = finder.find_spec(name)
    if found is None or found.loader is None:
        raise ImportError(f"it has no extension module for Python {sys.version.split()[0]}", name=name)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Agent:
    def __init__(self, bindings: Any, name: str, serving: bool, within_host: bool) -> None:
        self.name = name
        self._b = bindings
        self._pid = os.getpid()
        own = [
            value for key, value in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error")
        ]
        # NIXL's exceptions have no base class of their own.
        self._errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, *own)
        self._agent: Any = None
        self._kept: list[Any] = []
        config = bindings.nixlAgentConfig()
        config.useProgThread = serving
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        config.pthrDelay = _PROGRESS_WAIT_US
        config.captureTelemetry = False
        try:
            self._agent = bindings.nixlAgent(name, config)
            self._kept.extend(filterfalse(_keep, (self._agent,)))  # in one step
            self._agent.createBackend("UCX", _config(within_host))
        except Exception as exc:
            self.close([])
            raise TransportUnavailable(f"NIXL has no agent with UCX for us: {_text(exc)}") from exc
        except BaseException:
            self.close([])
            raise

    def register(self, memory: str, rows: U64) -> None:
        self._call(self._agent.registerMem, self._registration(memory, rows), [])

    def deregister(self, memory: str, rows: U64) -> None:
        self._call(self._agent.deregisterMem, self._registration(memory, rows), [])

    def metadata(self, memory: str, rows: U64, connection: bool) -> bytes:
        found: bytes = self._call(
            self._agent.getLocalPartialMD, self._registration(memory, rows), connection, []
        )
        return found

    def load(self, metadata: bytes) -> None:
        self._call(self._agent.loadRemoteMD, metadata)

    def make(self, peer: str, there: tuple[str, U64], here: tuple[str, U64], nbytes: U64) -> int:
        local, remote = self._pieces(*here, nbytes), self._pieces(*there, nbytes)
        made: int = self._call(self._agent.createXferReq, self._b.NIXL_READ, local, remote, peer, "", [])
        return made

    def post(self, transfer: int) -> bool:
        done: bool = self._call(self._agent.postXferReq, transfer, b"") == self._b.NIXL_SUCCESS
        return done

    def ended(self, transfer: int) -> bool:
        done: bool = self._call(self._agent.getXferStatus, transfer) == self._b.NIXL_SUCCESS
        return done

    def release(self, transfer: int) -> None:
        self._call(self._agent.releaseXferReq, transfer)

    def close(self, ended: list[int]) -> None:
        agent = self._agent
        if agent is None or os.getpid() != self._pid:
            return
        while ended:
            with contextlib.suppress(*self._errors):
                deque(map(agent.releaseXferReq, map(ended.pop, repeat(0, len(ended)))), 0)
        # UCX takes an endpoint whose peer has died down as it makes progress; destroyed with one half way, it
        # ends the process ("Assertion `ucs_arbiter_group_is_empty(group)' failed").
        with contextlib.suppress(*self._errors):
            agent.getNotifs({}, [])
        deque(map(_let_go, map(self._kept.pop, repeat(0, len(self._kept)))), 0)
        self._agent = None

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except self._b.nixlRemoteDisconnectError as exc:
            raise NixlLost(_text(exc)) from exc
        except self._errors as exc:
            raise NixlRefused(f"{function.__name__}: {_text(exc)}") from exc

    def _registration(self, memory: str, rows: U64) -> Any:
        segment, device = self._segment(memory)
        table = np.empty((len(rows), 3), dtype=np.uint64)
        table[:, 0] = rows[:, 0]
        table[:, 1] = rows[:, 1] - rows[:, 0]
        table[:, 2] = device
        return self._b.nixlRegDList(segment, table)

    def _pieces(self, memory: str, addresses: U64, nbytes: U64) -> Any:
        segment, device = self._segment(memory)
        if len(addresses) == 1:
            return self._b.nixlXferDList(segment, [(addresses.item(), nbytes.item(), device)])
        table = np.empty((len(addresses), 3), dtype=np.uint64)
        table[:, 0] = addresses
        table[:, 1] = nbytes
        table[:, 2] = device
        return self._b.nixlXferDList(segment, table)

    def _segment(self, memory: str) -> tuple[Any, int]:
        kind, _, device = memory.partition(":")
        return getattr(self._b, _SEGMENTS[kind]), int(device or 0)


def _config(within_host: bool) -> dict[str, str]:
    """What is set here, unless the user has.

    UCX waits for a connection over TCP as long as the system does, minutes, if it is not told not to. And which
    process of *this* host it reads, where it uses what processes of a host share, is what the peer's address says.
    """
    values = {_CONNECT: "y"} if within_host else {_CONNECT: "y", _MEANS: "^sm"}
    config = ",".join(
        [f"{name.removeprefix('UCX_')}={value}" for name, value in values.items() if name not in os.environ]
    )
    return {"engine_config": config} if config else {}


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
