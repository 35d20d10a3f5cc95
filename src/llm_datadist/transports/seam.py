"""The seam for data movers: what a transport is, what it promises, and how it says what went wrong.

Strategy: a channel moves bytes from a peer's memory into ours, never the other way. A one-sided
transport is given the peer's addresses; any other is given a selector, opaque bytes that the owner's
``ReadSource`` turns into memory (and checks before the first and after the last byte).
Invariants: when ``Completion.wait`` has returned, nothing of that read writes any more; ``wait`` returns
by its deadline (plus one bounded call, see ``TransportCaps.cancellable``) whatever the peer does.
Threads: every method may be called from any thread; ``cancel`` and ``close`` while ``wait`` runs.
Instants are seconds of ``time.monotonic()``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from llm_datadist._core.segments import Extents, Segments


@dataclass(frozen=True, slots=True)
class TransportCaps:
    """What a transport can do."""

    one_sided: bool  # reads by address; the owner's Python is not needed
    same_host_only: bool
    needs_registration: bool = False
    max_segments: int = 1024
    cancellable: bool = True


class FaultKind(Enum):
    """Why a read ended before its last byte."""

    TIMEOUT = "timeout"  # the deadline passed
    CANCELLED = "cancelled"  # cancel() or close() was called
    PEER_LOST = "peer lost"  # the peer's process or the connection is gone
    SOURCE = "source"  # the peer's memory cannot be read
    DESTINATION = "destination"  # our own memory cannot be written
    REFUSED = "refused"  # the owner refused: ``code`` is its status code
    CHANNEL = "channel"  # anything else that the system reported


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason, in words for the user and as a kind for the engine."""

    kind: FaultKind
    text: str
    code: int = 0
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The end of a read: bytes that arrived (all of them when ``fault`` is None)."""

    nbytes: int
    fault: Fault | None = None


class TransportUnavailable(Exception):  # noqa: N818 - a probe's answer, not an error of the caller
    """Raised by ``Transport.open``: this transport cannot reach that peer; the text says why."""


@dataclass(frozen=True, slots=True)
class PeerEndpoint:
    """What a transport needs to reach one linked peer.

    Attributes:
        cluster_id: The peer.
        blob: What the peer's ``Transport.endpoint()`` returned.
        link_token: Secret of this link, shared by both ends; a data connection shows it in its first frame.
        address: (host, port) that this side dialled; None on the side that was dialled.
        ask_for_connections: Asks the dialling side for this many more connections that we may read on.
    """

    cluster_id: int
    blob: bytes
    link_token: bytes
    address: tuple[str, int] | None
    ask_for_connections: Callable[[int], None]


class Completion(Protocol):
    """One read under way. The thread that calls ``wait`` moves bytes itself."""

    def wait(self, *, deadline: float) -> Progress:
        """Returns when all is there, or it failed, or at the deadline; nothing is written afterwards."""

    def cancel(self, reason: str = "") -> None:
        """Makes ``wait`` return soon with CANCELLED. Never blocks."""


class Channel(Protocol):
    """The way to one peer's memory."""

    def read(self, plan: Segments) -> Completion:
        """Prepares a read, without moving a byte yet."""

    def close(self) -> None:
        """Cancels what runs and frees what the channel holds. Never blocks; idempotent."""


class Transport(Protocol):
    """A data mover of one engine."""

    name: ClassVar[str]
    caps: ClassVar[TransportCaps]

    def endpoint(self) -> bytes:
        """Opaque bytes that travel in the handshake and come back in the peer's ``PeerEndpoint.blob``."""

    def open(self, peer: PeerEndpoint, *, deadline: float) -> Channel:
        """Proves that the peer can be read.

        Raises:
            TransportUnavailable: It cannot; the text is the reason shown to users.
        """

    def close(self) -> None:
        """Ends all channels, threads and descriptors. Idempotent."""


class Serving(Protocol):
    """One read that a peer was allowed: memory to send, and the check that it is still the same."""

    extents: Extents

    def check(self) -> Fault | None:
        """Whether the memory is still what was asked for: before the first and after the last byte."""

    def close(self) -> None:
        """The read is over, well or not. Idempotent."""


class ReadSource(Protocol):
    """The owner's side of a transport that is not one-sided. The engine implements it."""

    def open(self, link_token: bytes, selector: bytes) -> Serving | Fault:
        """Finds, checks and pins what ``selector`` names. Does not block."""


class StreamChannel(Channel, Protocol):
    """A channel made of connections through the peer's listening port."""

    def dial_for_peer(self, count: int) -> None:
        """Dials connections on which the *peer* reads and we serve (it asked for them). Does not block."""


class StreamTransport(Transport, Protocol):
    """A transport whose connections come in through the engine's one listening port.

    Its channel is opened on every link whose peer offers it, also where the peer is read by another one:
    rights are per direction, so the peer may need connections where we do not.
    """

    def open(self, peer: PeerEndpoint, *, deadline: float) -> StreamChannel:
        """As ``Transport.open``, without I/O."""

    def adopt(self, sock: socket.socket, link_token: bytes, peer_reads: bool, leftover: bytes) -> None:
        """Takes over an accepted data connection after its first frame (``_wire.messages.DataHello``).

        Args:
            sock: Non-blocking, connected; owned by the transport from now on.
            link_token: Which link it belongs to; an unknown one: the socket is closed.
            peer_reads: True: the peer requests and we serve on it; False: the other way round.
            leftover: Bytes that were read beyond the first frame.
        """
