"""``local``: any memory of another process on this host, by ``process_vm_readv``.

Strategy: the kernel names the peer (SO_PEERCRED on an abstract UNIX socket), a pidfd tells when it has
gone, and the proof of the handshake, read out of its memory, shows that it is the other end of the
connection: a pidfd that is still silent after that read means that the pid has meant one process all along.
Only a process of the same user is read, whatever else this one may: memory is its owner's to leave unanswered
(userfaultfd, FUSE), and a read of it waits in the kernel, on the control thread in a handshake.
Where its proofs are, the name of the socket commits that process to: a peer that could choose would name
memory of another process into which it had the right bytes put, a cache. The socket need not live longer
than ``open``, and the owner closes what it accepts at once (nothing held, nothing to limit);
``connect`` does not wait for the accept, so a stopped owner delays nobody.
Invariant: when ``wait`` has returned (or raised), no thread of that read can begin another call.
Threads: as the seam says; the listener's callback runs on the control thread and never blocks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._shortages import reason_of
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.transports import _libc
from llm_datadist.transports._meeting import AdoptReader, DropReader, Meeting, credentials, meet
from llm_datadist.transports._proofs import ProofPage
from llm_datadist.transports._rows import fit_one_call
from llm_datadist.transports.local_read import LocalRead, LocalRows, Peer, read_word
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import (
    NOT_THIS_CONNECTION,
    Fault,
    PeerEndpoint,
    TransportCaps,
    TransportUnavailable,
)

_NAME_PREFIX = b"\0llm-datadist/"  # the leading zero: an abstract name, which no file system holds
_SALT_NBYTES = 16


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    name: bytes
    salt: bytes
    page: int
    slot: int
    proof: bytes

    def is_sound(self) -> bool:
        """Whether its numbers are within their limits, and the name is that of whoever has its proofs there."""
        numbers = 0 <= self.page < 1 << 64 and 0 <= self.slot < limits.PROOFS
        sizes = len(self.salt) == _SALT_NBYTES and len(self.proof) == PROOF_NBYTES
        return numbers and sizes and self.name.startswith(_prefix(self.salt, self.page))


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
        self._page = ProofPage()
        self._salt = random_bytes(_SALT_NBYTES)
        self._meeting = Meeting(
            _prefix(self._salt, self._page.address),
            socket.SOCK_STREAM,
            random_bytes,
            socket.socket.close,
            lambda sock, reason: None,  # whoever comes has what it came for
            adopt_reader,
            drop_reader,
        )

    def endpoint(self, proof: bytes) -> bytes:
        """Where a peer finds this process, and the proof."""
        slot = self._page.show(proof)
        return msgspec.msgpack.encode(
            _Endpoint(
                name=self._meeting.name, salt=self._salt, page=self._page.address, slot=slot, proof=proof
            )
        )

    def hide(self, proof: bytes) -> None:
        """See the seam."""
        self._page.hide(proof)

    def open(self, peer: PeerEndpoint, *, deadline: float) -> LocalChannel:
        """Proves that the peer's memory can be read. Never waits, so ``deadline`` is never reached.

        Raises:
            TransportUnavailable: It cannot; the text is the reason shown to users.
        """
        try:
            endpoint = msgspec.msgpack.decode(peer.blob, type=_Endpoint)
        except msgspec.MsgspecError as exc:
            raise TransportUnavailable(f"the peer's endpoint of transport local is not valid: {exc}") from exc
        if not endpoint.is_sound():
            raise TransportUnavailable(
                "the peer's endpoint of transport local is not valid: name, page, slot or proof"
            )
        if endpoint.proof != peer.proof:
            raise TransportUnavailable(NOT_THIS_CONNECTION)
        pid, pidfd = _find(endpoint.name)
        channel = LocalChannel(Peer(pid, pidfd), self._movers, self._forget)
        try:
            _prove(channel.peer, endpoint.page + endpoint.slot * PROOF_NBYTES, peer.proof)
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
        self._page.close()

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


def _prefix(salt: bytes, page: int) -> bytes:
    """How the name of a process begins that has its proofs at ``page``.

    Everybody on the host sees names, but not where memory is: that is told to peers.
    """
    told = hashlib.sha256(salt + page.to_bytes(8, "little")).hexdigest()[:48]
    return _NAME_PREFIX + told.encode() + b"/"


def _find(name: bytes) -> tuple[int, int]:
    """Pid, as seen from here, of the process that listens at ``name``, and a pidfd of it."""
    with meet(name, socket.SOCK_STREAM) as sock:
        pid, uid = credentials(sock)
        if pid == 0:
            raise TransportUnavailable(
                "the peer is in another pid namespace (SO_PEERCRED gives 0): its memory cannot be addressed"
            )
        if uid != os.geteuid():
            raise TransportUnavailable(
                f"process {pid} runs with user id {uid}, this one with {os.geteuid()}: transport local reads only "
                "processes of the same user, also as root; run both as one user"
            )
        try:
            return pid, os.pidfd_open(pid)
        except OSError as exc:
            raise TransportUnavailable(
                f"process {pid} cannot be watched with pidfd_open: {reason_of(exc)}"
            ) from exc


def _prove(peer: Peer, address: int, proof: bytes) -> None:
    """Reads the proof out of the peer's memory."""
    seen = np.zeros(PROOF_NBYTES, dtype=np.uint8)
    got = _libc.read_one(peer.pid, int(seen.ctypes.data), address % (1 << 64), PROOF_NBYTES)
    if got < 0 and -got not in (errno.EFAULT, errno.ESRCH):
        raise TransportUnavailable(_refusal(peer.pid, -got))
    if seen.tobytes() != proof or peer.gone():
        raise TransportUnavailable(
            f"process {peer.pid} is not, or no longer, the other end of this connection"
        )


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
