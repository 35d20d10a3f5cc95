"""``local``: any memory of another process on this host, by ``process_vm_readv``.

Strategy: the kernel names the peer (SO_PEERCRED on an abstract UNIX socket), a pidfd tells when it has
gone, and a nonce read out of its memory proves that it is the process of the handshake: a pidfd that is
still silent after that read means that the pid has meant one process all along. So the socket need not
live longer than ``open``, and the owner closes what it accepts at once (nothing held, nothing to limit);
``connect`` does not wait for the accept, so a stopped owner delays nobody.
Invariant: when ``wait`` has returned (or raised), no thread of that read can begin another call.
Threads: as the seam says; the listener's callback runs on the control thread and never blocks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.transports import _libc
from llm_datadist.transports._meeting import AdoptReader, DropReader, Meeting, credentials, meet
from llm_datadist.transports._rows import fit_one_call
from llm_datadist.transports.local_read import LocalRead, LocalRows, Peer, read_word
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import (
    Fault,
    PeerEndpoint,
    TransportCaps,
    TransportUnavailable,
)

_NONCE_NBYTES = 16
_NAME_PREFIX = b"\0llm-datadist/"  # the leading zero: an abstract name, which no file system holds
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK: a forked child must not pass for its parent


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    name: bytes
    nonce_address: int
    nonce: bytes


class LocalTransport:
    """Reads peers on this host, and is read by them.

    Args:
        movers: Threads that help with large reads; the caller owns them.
        adopt_reader: Registers a socket and a callback for "readable" with the control loop.
        drop_reader: Takes the socket out again.
        allow_ptrace: Lets every process of this user read this one where Yama restricts it.
        random_bytes: Source of secrets, as ``secrets.token_bytes``.
    """

    name: ClassVar[str] = "local"
    caps: ClassVar[TransportCaps] = TransportCaps(one_sided=True, same_host_only=True, rows=True)

    def __init__(
        self,
        movers: Movers,
        adopt_reader: AdoptReader,
        drop_reader: DropReader,
        allow_ptrace: bool,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._movers = movers
        self._lock = threading.Lock()
        self._channels: set[LocalChannel] = set()
        self._closed = False
        if allow_ptrace:
            _libc.allow_any_tracer()
        self._nonce_page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # Linux < 4.14; the pidfd still tells parent from child
            self._nonce_page.madvise(_WIPE_ON_FORK)
        nonce = random_bytes(_NONCE_NBYTES)
        self._nonce_page[:_NONCE_NBYTES] = nonce
        self._meeting = Meeting(
            _NAME_PREFIX, socket.SOCK_STREAM, random_bytes, socket.socket.close, adopt_reader, drop_reader
        )
        address = int(np.frombuffer(self._nonce_page, dtype=np.uint8).ctypes.data)
        self._endpoint = msgspec.msgpack.encode(
            _Endpoint(name=self._meeting.name, nonce_address=address, nonce=nonce)
        )

    def endpoint(self) -> bytes:
        """Where peers find this process, and the proof that they have found it."""
        return self._endpoint

    def open(self, peer: PeerEndpoint, *, deadline: float) -> LocalChannel:
        """Proves that the peer's memory can be read. Never waits, so ``deadline`` is never reached.

        Raises:
            TransportUnavailable: It cannot; the text is the reason shown to users.
        """
        try:
            endpoint = msgspec.msgpack.decode(peer.blob, type=_Endpoint)
        except msgspec.MsgspecError as exc:
            raise TransportUnavailable(f"the peer's endpoint of transport local is not valid: {exc}") from exc
        if not endpoint.name.startswith(_NAME_PREFIX) or len(endpoint.nonce) != _NONCE_NBYTES:
            raise TransportUnavailable("the peer's endpoint of transport local is not valid: name or nonce")
        pid, pidfd = _find(endpoint.name)
        channel = LocalChannel(Peer(pid, pidfd), self._movers, self._forget)
        try:
            _prove(channel.peer, endpoint)
            with self._lock:
                if self._closed:
                    raise TransportUnavailable("transport local of this process is closed")
                self._channels.add(channel)
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Ends the listener and all channels. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._meeting.close()
        self._nonce_page.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors and touches nothing else."""
        self._meeting.close_after_fork()
        for channel in self._channels:
            channel.peer.close_after_fork()

    def _forget(self, channel: LocalChannel) -> None:
        with self._lock:
            self._channels.discard(channel)


class LocalChannel:
    """The way to one process's memory."""

    def __init__(self, peer: Peer, movers: Movers, forget: Callable[[LocalChannel], None]) -> None:
        self.peer = peer
        self._movers = movers
        self._forget = forget

    def read(self, plan: Segments) -> LocalRead:
        """Prepares a read; ``plan.source`` must be Extents."""
        return LocalRead(self.peer, self._movers, plan)

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        """One call of the kernel, so ``deadline`` plays no part."""
        return read_word(self.peer, address)

    def rows(self, source: Extents, destination: Extents, nbytes: int) -> LocalRows | None:
        """See ``RowsChannel``."""
        if not fit_one_call(len(source.bases), nbytes):
            return None
        return LocalRows(self.peer, source.bases, destination.bases, nbytes)

    def close(self) -> None:
        """Cancels what runs; the last of it frees the descriptor."""
        self.peer.close()
        self._forget(self)


def _find(name: bytes) -> tuple[int, int]:
    """Pid, as seen from here, of the process that listens at ``name``, and a pidfd of it."""
    with meet(name, socket.SOCK_STREAM) as sock:
        pid, _ = credentials(sock)
        if pid == 0:
            raise TransportUnavailable(
                "the peer is in another pid namespace (SO_PEERCRED gives 0): its memory cannot be addressed"
            )
        try:
            return pid, os.pidfd_open(pid)
        except OSError as exc:
            raise TransportUnavailable(f"process {pid} cannot be watched with pidfd_open: {exc}") from exc


def _prove(peer: Peer, endpoint: _Endpoint) -> None:
    """Reads the nonce out of the peer's memory."""
    seen = np.zeros(_NONCE_NBYTES, dtype=np.uint8)
    address = endpoint.nonce_address % (1 << 64)
    got = _libc.read_one(peer.pid, int(seen.ctypes.data), address, _NONCE_NBYTES)
    if got < 0 and -got not in (errno.EFAULT, errno.ESRCH):
        raise TransportUnavailable(_refusal(peer.pid, -got))
    if seen.tobytes() != endpoint.nonce or peer.gone():
        raise TransportUnavailable(f"process {peer.pid} is not, or no longer, the one of the handshake")


def _refusal(pid: int, number: int) -> str:
    """Why the kernel does not let us read ``pid``, in words that help."""
    reason = f"process_vm_readv from process {pid} failed: {os.strerror(number)}"
    if number == errno.ENOSYS:
        return f"{reason}; this kernel does not offer it, or a seccomp profile hides it"
    if number != errno.EPERM:
        return reason
    return (
        f"{reason}; this process runs with user id {os.geteuid()}, the other with {_owner_of(pid)}. Reading "
        "needs the right to ptrace it: the same user ids (or CAP_SYS_PTRACE) and a dumpable process. Under "
        f"Yama ({_yama_scope()}) the owner must set llm.AllowPtrace to 1; a container's seccomp profile "
        "may forbid it as well"
    )


def _owner_of(pid: int) -> str:
    try:
        return str(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return "one that is not visible here"


def _yama_scope() -> str:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            return f"ptrace_scope {file.read().strip()}"
    except OSError:
        return "not active here"
