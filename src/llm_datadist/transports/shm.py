"""``shm``: memory of a peer's pools on this host, mapped here and copied out of it.

Strategy: the owner gives sealed memfds to readers of its own user who show the proof of a handshake that is
under way there, once (``shm_owner``): of another connection it has made no such proof. The reader maps them
(``shm_memory``) and copies without the kernel (``shm_read``). That is faster than ``local``, whose kernel
looks at every page, and it needs no right to ptrace. Words are read in a mapping of the slab.
Invariants: a reader can neither write nor resize what it is given; the end of the connection tells either
side that the other has gone, across pid namespaces too.
Threads: as the seam says; either side speaks and hears on its control thread; ``open`` waits for no answer.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from llm_datadist._core import limits
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.devices.shared_memory import SharedArea
from llm_datadist.transports import _libc
from llm_datadist.transports._meeting import AdoptReader, DropReader, Meeting, credentials, meet
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import (
    NOT_THIS_CONNECTION,
    Fault,
    FaultKind,
    PeerEndpoint,
    TransportCaps,
    TransportUnavailable,
)
from llm_datadist.transports.shm_areas import Areas, Box
from llm_datadist.transports.shm_memory import PeerMemory
from llm_datadist.transports.shm_owner import Giver, say_refusal, whose_refusal
from llm_datadist.transports.shm_read import ShmRead
from llm_datadist.transports.shm_rows import ShmRows, shm_rows

_NAME_PREFIX = b"\0llm-datadist-shm/"
_WORD_NBYTES = 8
_HEARD_AT_THE_END = 64  # of a handshake: readers that have connected by then, those of others before its own
_BEST_BELOW_NBYTES = 12 << 10  # from there on the kernel copies as fast (`python -m benchmarks --rows sizes`)
_TOP = 1 << 64


class _Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    name: bytes
    proof: bytes
    areas: list[tuple[int, int]]


class ShmTransport:
    """Maps memory of peers on this host, and lets them map ours.

    Args:
        areas: What peers may map: pools, and the slab of words. Their descriptors stay open, and their
            memory mapped, until ``close``.
        movers: Threads that help with large reads; the caller owns them.
        adopt_reader: Registers a socket and a callback for "readable" with the control loop.
        drop_reader: Takes the socket out again.
        random_bytes: Source of secrets, as ``secrets.token_bytes``.
    """

    name: ClassVar[str] = "shm"
    caps: ClassVar[TransportCaps] = TransportCaps(
        one_sided=True, same_host_only=True, partial=True, rows=True, best_below_nbytes=_BEST_BELOW_NBYTES
    )

    def __init__(
        self,
        areas: Sequence[SharedArea],
        movers: Movers,
        adopt_reader: AdoptReader,
        drop_reader: DropReader,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        if not 0 < len(areas) <= limits.AREAS:
            raise ValueError(f"a transport shm shares 1 to {limits.AREAS} areas, not {len(areas)}")
        self._own = Areas((area.address, area.nbytes, 0) for area in areas)
        self._movers = movers
        self._by_kernel = _libc.can_read_own()
        self._lock = threading.Lock()
        self._channels: set[ShmChannel] = set()
        self._closed = False
        self._adopt_reader = adopt_reader
        self._drop_reader = drop_reader
        self._giver = Giver(areas, adopt_reader, drop_reader)
        self._meeting = Meeting(
            _NAME_PREFIX,
            socket.SOCK_SEQPACKET,
            random_bytes,
            self._giver.welcome,
            say_refusal,
            adopt_reader,
            drop_reader,
        )
        self._areas = [(area.address, area.nbytes) for area in areas]

    def endpoint(self, proof: bytes) -> bytes:
        """Where a reader finds this process, what it must show, and what it will get."""
        self._giver.expect(proof)
        return msgspec.msgpack.encode(_Endpoint(name=self._meeting.name, proof=proof, areas=self._areas))

    def hide(self, proof: bytes) -> None:
        """See the seam. A reader that has connected by now is answered first."""
        if self._giver.expects(proof):
            self._meeting.accept(_HEARD_AT_THE_END)
            self._giver.hear_all()
            self._giver.forget(proof)

    def open(self, peer: PeerEndpoint, *, deadline: float) -> ShmChannel:
        """Asks the peer for its memory, which comes in later. Never waits, so ``deadline`` is never reached.

        Raises:
            TransportUnavailable: It cannot be asked, or would refuse; the text is the reason shown to users.
        """
        endpoint = _decode(peer.blob)
        if endpoint.proof != peer.proof:
            raise TransportUnavailable(NOT_THIS_CONNECTION)
        sock = meet(endpoint.name, socket.SOCK_SEQPACKET)
        memory = PeerMemory(sock, endpoint.areas, self._drop_reader)
        channel = ShmChannel(memory, self._own, self._by_kernel, self._movers, self._forget)
        try:
            _ask(sock, peer.proof, memory)
            with self._lock:
                if self._closed:
                    raise TransportUnavailable("transport shm of this process is closed")
                self._channels.add(channel)
            memory.listen(self._adopt_reader)
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Ends the listener, the connections of readers and all channels. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._meeting.close()
        self._giver.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors and touches nothing else."""
        self._meeting.close_after_fork()
        self._giver.close_after_fork()
        for channel in self._channels:
            channel.memory.close_after_fork()

    def _forget(self, channel: ShmChannel) -> None:
        with self._lock:
            self._channels.discard(channel)


class ShmChannel:
    """The way to the memory that one process shares."""

    def __init__(
        self,
        memory: PeerMemory,
        own: Areas,
        by_kernel: bool,
        movers: Movers,
        forget: Callable[[ShmChannel], None],
    ) -> None:
        self.memory = memory
        self._own = own
        self._by_kernel = by_kernel
        self._movers = movers
        self._forget = forget
        self._turn = threading.Lock()

    def read(self, plan: Segments) -> ShmRead:
        """Prepares a read; ``plan.source`` must be Extents that are covered."""
        return ShmRead(self.memory, self._own, self._by_kernel, self._movers, plan)

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        """One load, between two turns of the memory's lock; ``deadline`` plays no part."""
        memory = self.memory
        with memory.hold() as held:
            if not held:
                return Fault(FaultKind.CANCELLED, "the channel is closed")
            shift = memory.settle().shift_at(address, _WORD_NBYTES)
            word = 0 if shift is None else ctypes.c_uint64.from_address(address + shift).value
            if memory.gone():
                return memory.lost()
            return word if shift is not None else memory.beyond(address)

    def peek(self, address: int) -> int | None:
        """See ``WordChannel``."""
        words = self.memory.words
        if words is None:
            return None
        at = address - words.low
        with self._turn:  # what was read before stays before, what is read after stays after
            pass
        if at & 7 or not 0 <= at < len(words.array) << 3:
            return None
        return words.array[at >> 3]

    def covers(self, source: Extents) -> bool:
        """Whether the peer has sent the memory that ``source`` is in; waits shortly if it has sent none yet."""
        if not source.nbytes:
            return True
        with self.memory.hold() as held:
            return held and self.memory.settle().shifts_of(source, Box.of(source)) is not None

    def rows(self, source: Extents, destination: Extents, nbytes: int) -> ShmRows | None:
        """See ``RowsChannel``."""
        return shm_rows(self.memory, self._own, self._by_kernel, source, destination, nbytes)

    def settle(self, *, deadline: float) -> bool:
        """See ``PartialChannel``."""
        return self.memory.settle_by(deadline)

    @property
    def refusal(self) -> str:
        """Why nothing is within reach (yet); empty once the memory has come."""
        return self.memory.reason

    @property
    def refusal_cause(self) -> BaseException | None:
        """What the system reported, if that is why."""
        return self.memory.cause

    def close(self) -> None:
        """Cancels what runs; the last of it unmaps the memory."""
        self.memory.close()
        self._forget(self)


def _ask(sock: socket.socket, proof: bytes, memory: PeerMemory) -> None:
    """Shows the proof, unless the owner would refuse us anyhow, or has done so already."""
    refusal = whose_refusal(credentials(sock)[1], os.geteuid())
    if refusal:
        raise TransportUnavailable(refusal)
    try:
        sock.send(proof)
    except OSError as exc:
        memory.hear()
        raise TransportUnavailable(memory.reason) from exc


def _decode(blob: bytes) -> _Endpoint:
    """The peer's endpoint, whose every number is foreign."""
    try:
        endpoint = msgspec.msgpack.decode(blob, type=_Endpoint)
    except msgspec.MsgspecError as exc:
        raise TransportUnavailable(f"the peer's endpoint of transport shm is not valid: {exc}") from exc
    if not endpoint.name.startswith(_NAME_PREFIX) or len(endpoint.proof) != PROOF_NBYTES:
        raise TransportUnavailable("the peer's endpoint of transport shm is not valid: name or proof")
    end = 0
    for address, nbytes in sorted(endpoint.areas):
        if address < end or nbytes <= 0 or address + nbytes >= _TOP:
            raise TransportUnavailable(
                "the peer's endpoint of transport shm is not valid: areas overlap, or are beyond 2**64"
            )
        end = address + nbytes
    count = len(endpoint.areas)
    if not 0 < count <= limits.AREAS:
        raise TransportUnavailable(
            f"the peer's endpoint of transport shm is not valid: {count} areas, 1 to {limits.AREAS} can be"
        )
    return endpoint
