"""Takes system calls away from a peer process, as a container's profile or an older kernel does. Cannot be undone."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

from tests.support.peers import Peer
from tests.support.pool import Spawner
from tests.support.world import World

_CALLS = {
    "x86_64": {"seccomp": 317, "process_vm_readv": 310, "memfd_create": 319, "fcntl": 72, "pidfd_open": 434},
    "aarch64": {"seccomp": 277, "process_vm_readv": 270, "memfd_create": 279, "fcntl": 25, "pidfd_open": 434},
}
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_NUMBER_AT, _SECOND_ARGUMENT_AT = 0, 24


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def deny(w: World, call: str, errno: int, second_argument: int | None = None) -> None:
    """From now on that call fails with that error in every thread of this process, perhaps only with one argument."""
    number = _CALLS[platform.machine()]
    checks = [(_NUMBER_AT, number[call])]
    if second_argument is not None:
        checks.append((_SECOND_ARGUMENT_AT, second_argument))
    rows = []
    for at, (offset, value) in enumerate(checks):
        rows.append((_LOAD, 0, 0, offset))
        rows.append((_JUMP_IF_EQUAL, 0, 2 * (len(checks) - at) - 1, value))
    rows += [(_RETURN, 0, 0, _ERRNO | errno), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = _Program(len(rows), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        number["seccomp"], _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def peer_without(spawn: Spawner, call: str, errno: int, second_argument: int | None = None) -> Peer:
    """A process that lacks a call; no later test gets it."""
    peer = spawn(env={"LLM_DATADIST_TESTS": "a process of its own"})
    peer.call(deny, call, errno, second_argument)
    return peer
