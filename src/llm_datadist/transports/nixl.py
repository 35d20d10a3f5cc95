"""``nixl``: registered memory of peers anywhere, through NVIDIA NIXL and UCX.

Strategy: one agent per engine serves; it knows our memory, and its metadata travel in the handshake and in
the tokens of caches. Each channel reads with an agent of its own (``nixl_session``), made anew whenever
anything went wrong. Agents have random names, so what is left of a peer's former life is nobody's.
Invariants: an agent never knows two ranges that merely overlap (``nixl_ranges.Book``). Memory that is
registered must stay mapped: over TCP, UCX touches it in its own threads.
Threads: as the seam says. UCX adds one thread per process and one per engine, both asleep unless peers read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from llm_datadist._core.segments import U64, Extents
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.devices.cpu import first_unwritable
from llm_datadist.transports import _nixl
from llm_datadist.transports._nixl import Agents, NixlLost, NixlRefused
from llm_datadist.transports._proofs import ProofPage
from llm_datadist.transports.nixl_channel import NixlChannel
from llm_datadist.transports.nixl_metadata import BadMetadata, check
from llm_datadist.transports.nixl_ranges import Book, none, spans
from llm_datadist.transports.nixl_told import ID_NBYTES, Endpoint, Held, Token
from llm_datadist.transports.seam import (
    NOT_THIS_CONNECTION,
    PeerEndpoint,
    Region,
    RegistrationRefused,
    TransportCaps,
    TransportUnavailable,
)

LINGER_S = 0.5
RDMA_DEVICES = Path("/sys/class/infiniband")  # where the system lists them


def check_worth_it() -> None:
    """Whether the engine may take NIXL by itself.

    Raises:
        TransportUnavailable: It is not installed, or would go over TCP, where transport tcp is faster and safer.
    """
    _nixl.check_installed()
    if not RDMA_DEVICES.is_dir() or not any(RDMA_DEVICES.iterdir()):
        raise TransportUnavailable(
            f"there is no RDMA device here ({RDMA_DEVICES}), and over TCP transport tcp is faster and safer; "
            "transfer_backend='nixl' takes it all the same"
        )


class NixlTransport:
    """Reads peers with NIXL, and is read by them.

    Args:
        random_bytes: Source of names and secrets, as ``secrets.token_bytes``.
        linger_s: How long a transfer may go on after its deadline before the connection is cut.
        agents: Makes NIXL agents; None: those of the installed package.

    Raises:
        TransportUnavailable: NIXL is missing or has no agent for us; the text says why.
    """

    name: ClassVar[str] = "nixl"
    caps: ClassVar[TransportCaps] = TransportCaps(
        one_sided=True,
        same_host_only=False,
        partial=True,
        needs_registration=True,
        rows=True,
        cancellable=False,
    )

    def __init__(
        self,
        random_bytes: Callable[[int], bytes],
        linger_s: float = LINGER_S,
        agents: Agents | None = None,
    ) -> None:
        self._random_bytes = random_bytes
        self._linger_s = linger_s
        self._agents = agents or _nixl.agents()
        self._lock = threading.Lock()
        self._closed = False
        self._channels: set[NixlChannel] = set()
        self._books: dict[str, Book] = {}
        self._tokens: dict[bytes, tuple[str, U64]] = {}
        self._held = Held()
        self._page = ProofPage()
        self._nonce = random_bytes(PROOF_NBYTES)  # stays: it tells readers that we live
        self._nonce_slot = self._page.show(self._nonce)
        self._always = b"", b""
        self._serving = self._agents(random_bytes(12).hex(), serving=True, within_host=True)
        try:
            self._enter(
                "host", np.array([[0, self._page.nbytes]], dtype=np.uint64) + np.uint64(self._page.address)
            )
            self.offer()
        except (NixlRefused, NixlLost) as exc:
            self._serving.close([])
            raise TransportUnavailable(f"NIXL registers no memory here: {exc}") from exc
        except BadMetadata as exc:
            self._serving.close([])
            raise TransportUnavailable(f"this NIXL is of a version that is not known here: {exc}") from exc

    def register(self, region: Region) -> bytes:
        """See ``RegisteringTransport``."""
        memory = region.memory
        if not _nixl.knows(memory):
            raise RegistrationRefused(f"NIXL has no memory type for {memory!r}")
        wanted = _spans_of(region)
        if memory == "host":
            _check_writable(region)
        with self._lock:
            if self._closed:
                raise RegistrationRefused("transport nixl of this process is closed")
            try:
                used = self._enter(memory, wanted)
                metadata = self._serving.metadata(memory, used, False) if len(used) else b""
            except (NixlRefused, NixlLost) as exc:
                raise RegistrationRefused(f"NIXL does not register it: {exc}") from exc
            token = Token(agent=self._serving.name, memory=memory, rows=_packed(used), metadata=metadata)
            name = self._random_bytes(ID_NBYTES)
            self._tokens[name] = memory, used
        return name + msgspec.msgpack.encode(token)

    def unregister(self, token: bytes) -> None:
        """See ``RegisteringTransport``."""
        with self._lock:
            memory, used = self._tokens.pop(token[:ID_NBYTES], ("", none()))
            if self._closed or not memory:
                return
            gone = self._books[memory].remove(used)
            if not len(gone):
                return
            self._serving.deregister(memory, gone)
            channels = list(self._channels)
        for channel in channels:
            channel.forget(memory, gone)

    def offer(self) -> None:
        """Host memory that is registered by now needs no token: whoever dials is told of it, before it has a link."""
        with self._lock:
            rows = self._books["host"].ranges.pairs
            metadata = self._serving.metadata("host", rows, True)
            check(metadata, self._serving.name, "host", rows, connection=True)
            self._always = _packed(rows), metadata

    def endpoint(self, proof: bytes) -> bytes:
        """How a peer finds and recognises us, and the proof."""
        rows, metadata = self._always
        slot = self._page.show(proof)
        endpoint = Endpoint(
            agent=self._serving.name,
            proof=proof,
            proof_address=self._page.address + slot * PROOF_NBYTES,
            nonce_address=self._page.address + self._nonce_slot * PROOF_NBYTES,
            nonce=self._nonce,
            rows=rows,
            metadata=metadata,
        )
        return msgspec.msgpack.encode(endpoint)

    def hide(self, proof: bytes) -> None:
        """See the seam."""
        self._page.hide(proof)

    def open(self, peer: PeerEndpoint, *, deadline: float) -> NixlChannel:
        """Connects, and looks for the proof of the handshake.

        The peer says where it is, so that one that could write into memory that another process has registered, a
        cache, could have it put there: NIXL gives nothing by which that could be told.

        Raises:
            TransportUnavailable: It cannot be read; the text is the reason shown to users.
        """
        try:
            endpoint = msgspec.msgpack.decode(peer.blob, type=Endpoint)
        except msgspec.MsgspecError as exc:
            raise TransportUnavailable(f"the peer's endpoint of transport nixl is not valid: {exc}") from exc
        if endpoint.proof != peer.proof:
            raise TransportUnavailable(NOT_THIS_CONNECTION)
        agents = partial(self._agents, serving=False, within_host=peer.within_host)
        channel = NixlChannel(agents, endpoint, self._locate, self._linger_s, self._held, self._drop)
        with self._lock:
            if self._closed:
                raise TransportUnavailable("transport nixl of this process is closed")
            self._channels.add(channel)
        try:
            channel.prove(deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Ends all channels and the serving agent. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
        self._serving.close([])

    def close_after_fork(self) -> None:
        """In a forked child: nothing. UCX's threads are not here, so its agents are left alone until exec."""

    def _enter(self, memory: str, wanted: U64) -> U64:
        """Registers what is not registered; returns the rows that hold it."""
        book = self._books.setdefault(memory, Book())
        used, new = book.plan(wanted)
        if len(new):
            self._serving.register(memory, new)
        book.add(used, new)
        return used

    def _locate(self, destination: Extents) -> tuple[str, U64] | None:
        wanted = spans(destination)
        if wanted is None:
            return None
        for memory, book in list(self._books.items()):
            ranges = book.ranges
            found = ranges.find(wanted)
            if (found >= 0).all():
                return memory, ranges.pairs[found if len(found) == 1 else np.unique(found)]
        return None

    def _drop(self, channel: NixlChannel) -> None:
        with self._lock:
            self._channels.discard(channel)


def _check_writable(region: Region) -> None:
    """What is registered may become a destination, and UCX takes a page that it cannot write with SIGSEGV."""
    bad = first_unwritable(region.bases, region.nbytes)
    if bad is not None:
        raise RegistrationRefused(f"tensor {bad} at {int(region.bases[bad]):#x} is not writable memory")


def _spans_of(region: Region) -> U64:
    bases = np.asarray(region.bases, dtype=np.uint64)
    if not region.nbytes or not len(bases):
        return none()
    pairs = np.stack((bases, bases + np.uint64(region.nbytes)), axis=1)
    if (pairs[:, 1] <= pairs[:, 0]).any():
        raise RegistrationRefused(f"tensors of {region.nbytes} bytes end beyond the address space")
    return pairs


def _packed(rows: U64) -> bytes:
    return rows.astype("<u8", copy=False).tobytes()
