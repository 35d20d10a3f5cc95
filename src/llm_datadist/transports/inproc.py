"""``inproc``: the reference twin of the one-sided transports, within one process.

Strategy: simple on purpose. Peers meet in a ``Hub`` that a test gives to both; each matched pair of ranges
is one copy by ``process_vm_readv`` on the own pid, because a bad address there is an answer (EFAULT),
where a plain copy would be a SIGSEGV.
Threads: as the seam says; the thread that waits moves all bytes.
"""

from __future__ import annotations

import errno
import os
import time
from typing import ClassVar

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.transports import _libc
from llm_datadist.transports.seam import (
    NOT_THIS_CONNECTION,
    Fault,
    FaultKind,
    PeerEndpoint,
    Progress,
    TransportCaps,
    TransportUnavailable,
)

_CALL_NBYTES = 1 << 20
_BATCH_RUNS = 1024


class Hub:
    """Where the transports of one simulation find each other."""

    def __init__(self) -> None:
        self._members: dict[bytes, InprocTransport] = {}

    def add(self, member: InprocTransport) -> bytes:
        """Names a member."""
        key = len(self._members).to_bytes(8, "little")
        self._members[key] = member
        return key

    def find(self, key: bytes) -> InprocTransport | None:
        """The member of that name, unless it was never there or is closed."""
        member = self._members.get(key)
        return member if member is not None and not member.closed else None


class InprocTransport:
    """Reads memory of this process on behalf of another engine in it."""

    name: ClassVar[str] = "inproc"
    caps: ClassVar[TransportCaps] = TransportCaps(one_sided=True, same_host_only=True)

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._key = hub.add(self)
        self.shown: set[bytes] = set()
        self.closed = False

    def endpoint(self, proof: bytes) -> bytes:
        """The name in the hub."""
        self.shown.add(proof)
        return self._key

    def hide(self, proof: bytes) -> None:
        """See the seam."""
        self.shown.discard(proof)

    def open(self, peer: PeerEndpoint, *, deadline: float) -> InprocChannel:
        """Finds the peer in the hub.

        Raises:
            TransportUnavailable: It is not there, or not the other end of the connection.
        """
        member = self._hub.find(peer.blob)
        if member is None:
            raise TransportUnavailable("the peer is not in the same process and hub")
        if peer.proof not in member.shown:
            raise TransportUnavailable(NOT_THIS_CONNECTION)
        return InprocChannel(self, member)

    def close(self) -> None:
        """Ends all reads from and by this member."""
        self.closed = True


class InprocChannel:
    """The way from one member to another."""

    def __init__(self, reader: InprocTransport, owner: InprocTransport) -> None:
        self._reader = reader
        self._owner = owner
        self._closed = False

    def read(self, plan: Segments) -> InprocRead:
        """Prepares a read; ``plan.source`` must be Extents."""
        return InprocRead(self, plan)

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        """Of this very process."""
        fault = self.fault()
        if fault is not None:
            return fault
        word = _libc.read_u64(os.getpid(), address)
        if word < 0:
            cause = OSError(-word, os.strerror(-word))
            return Fault(
                FaultKind.SOURCE, f"the word at {address:#x} cannot be read: {cause.strerror}", cause=cause
            )
        return word

    def close(self) -> None:
        """Cancels what runs."""
        self._closed = True

    def fault(self) -> Fault | None:
        """Why nothing can be read any more."""
        if self._closed or self._reader.closed:
            return Fault(FaultKind.CANCELLED, "the channel is closed")
        if self._owner.closed:
            return Fault(FaultKind.PEER_LOST, "the peer has closed its transport")
        return None


class InprocRead:
    """A read under way."""

    def __init__(self, channel: InprocChannel, plan: Segments) -> None:
        if not isinstance(plan.source, Extents):
            raise TypeError("transport inproc reads by address; this plan has a selector")
        if plan.source.nbytes != plan.nbytes:
            raise ValueError(f"the plan reads {plan.source.nbytes} bytes into {plan.nbytes}")
        self._channel = channel
        self._plan = plan
        self._cancelled: str | None = None

    def cancel(self, reason: str = "") -> None:
        """Ends the read after the copy in progress."""
        self._cancelled = reason or "cancelled"

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes."""
        moved = 0
        for batch in self._plan.expand(_BATCH_RUNS):
            for source, destination, nbytes in zip(*(column.tolist() for column in batch), strict=True):
                done, fault = self._copy(source, destination, nbytes, deadline)
                moved += done
                if fault is not None:
                    return Progress(moved, fault)
        return Progress(moved, self._channel.fault())

    def _copy(self, source: int, destination: int, nbytes: int, deadline: float) -> tuple[int, Fault | None]:
        at = 0
        while at < nbytes:
            fault = self._must_stop(deadline)
            if fault is not None:
                return at, fault
            size = min(_CALL_NBYTES, nbytes - at)
            done = _libc.read_one(os.getpid(), destination + at, source + at, size)
            if done > 0:
                at += done
            elif done != -errno.EINTR:
                return at, _fault_of(-done, source + at, destination + at)
        return at, None

    def _must_stop(self, deadline: float) -> Fault | None:
        if self._cancelled is not None:
            return Fault(FaultKind.CANCELLED, self._cancelled)
        if time.monotonic() >= deadline:
            return Fault(FaultKind.TIMEOUT, "the time ran out while bytes were being read")
        return self._channel.fault()


def _fault_of(number: int, source: int, destination: int) -> Fault:
    cause = OSError(number, os.strerror(number))
    if number != errno.EFAULT:
        return Fault(FaultKind.CHANNEL, f"process_vm_readv failed: {cause.strerror}", cause=cause)
    if not _libc.can_write_byte(destination):
        return Fault(FaultKind.DESTINATION, f"address {destination:#x} cannot be written", cause=cause)
    return Fault(FaultKind.SOURCE, f"address {source:#x} of the peer cannot be read", cause=cause)
