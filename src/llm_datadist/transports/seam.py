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

import msgspec

from llm_datadist._core.segments import U64, Extents, Segments


@dataclass(frozen=True, slots=True)
class TransportCaps:
    """What a transport can do."""

    one_sided: bool  # reads by address; the owner's Python is not needed
    same_host_only: bool
    partial: bool = False  # reads only some of the peer's memory: its channels are PartialChannel
    needs_registration: bool = False  # both ends tell it of memory before it moves: RegisteringTransport
    # Mean bytes of a run from which a one-sided way that is not partial is as fast.
    best_below_nbytes: int | None = None
    rows: bool = False  # its channels are RowsChannel
    units: bool = False  # its channels are UnitsChannel
    cancellable: bool = True  # else ``wait`` may outlast its deadline until the engine below lets go


class FaultKind(Enum):
    """Why a read ended before its last byte."""

    TIMEOUT = "timeout"  # the deadline passed
    CANCELLED = "cancelled"  # cancel() or close() was called
    PEER_LOST = "peer lost"  # the peer's process or the connection is gone
    SOURCE = "source"  # the peer's memory cannot be read
    DESTINATION = "destination"  # our own memory cannot be written
    REFUSED = "refused"  # the owner refused: ``code`` is its status code
    CHANNEL = "channel"  # anything else that the system reported


class Fault(msgspec.Struct, frozen=True):
    """One reason, in words for the user and as a kind for the engine."""

    kind: FaultKind
    text: str
    code: int = 0
    cause: BaseException | None = None


class Progress(msgspec.Struct, frozen=True):
    """The end of a read: bytes that arrived (all of them when ``fault`` is None)."""

    nbytes: int
    fault: Fault | None = None


class TransportUnavailable(Exception):  # noqa: N818 - a probe's answer, not an error of the caller
    """Raised by ``Transport.open``: this transport cannot reach that peer; the text says why."""


class RegistrationRefused(Exception):  # noqa: N818 - an answer, not an error of the caller
    """Raised by ``RegisteringTransport.register``; the text says why."""


NOT_THIS_CONNECTION = (
    "the peer does not show it for this very connection: there is a proxy or an address translation between the "
    "two, or it is another process's"
)


@dataclass(frozen=True, slots=True)
class PeerEndpoint:
    """What a transport needs to reach one linked peer.

    Attributes:
        cluster_id: The peer.
        blob: What the peer's ``Transport.endpoint()`` returned.
        link_token: Secret of this link, shared by both ends; a data connection shows it in its first frame.
        address: (host, port) that this side dialled; None on the side that was dialled.
        ask_for_connections: Asks the dialling side for this many more connections that we may read on.
        proof: What the peer has given its ``endpoint()``, ``PROOF_NBYTES`` of it, if it is the other end of this
            very connection. Where it cannot be found, the peer is not reached.
        within_host: Whether its connection comes from this host, as the system vouches.
    """

    cluster_id: int
    blob: bytes
    link_token: bytes
    address: tuple[str, int] | None
    ask_for_connections: Callable[[int], None]
    proof: bytes = b""
    within_host: bool = False


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


class OneSidedChannel(Channel, Protocol):
    """A channel that reads by address."""

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        """One aligned little-endian uint64 of the peer, read in one piece, after all earlier calls.

        What tells whether memory is still what it was: a reader looks at the word before its first byte
        and after its last one. Within a read that is under way only its caller asks.
        """


class WordChannel(Protocol):
    """A channel on which words can be looked at without a call of the kernel, whatever moves the bytes."""

    def peek(self, address: int) -> int | None:
        """As ``read_word``, but says nothing of the peer's life; None: out of reach, now or for good."""

    def close(self) -> None:
        """See ``Channel.close``."""


class PartialChannel(OneSidedChannel, Protocol):
    """A channel to some of the peer's memory. Words of its slab are always within reach."""

    @property
    def refusal(self) -> str:
        """Why nothing is within reach, now or for good; empty otherwise."""

    def settle(self, *, deadline: float) -> bool:
        """Waits for what the peer is still sending; whether all of it, or its refusal, has come."""

    def covers(self, source: Extents) -> bool:
        """Whether every byte of ``source`` is within reach. Does no I/O."""


OnCut = Callable[[Callable[[str], None] | None], None]


class Rows(Protocol):
    """A read that is repeated: one unit of each of some tensors, each time at another place."""

    def read(self, there: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """Moves the units that begin ``there`` bytes into the peer's tensors to ``here`` bytes into ours.

        In one step. Units must lie within the tensors. ``on_cut`` is told what ends a read that has to wait for
        anybody, with a reason, and None when it has ended; one that waits for nobody is too short to be cut off.

        Returns:
            True: all bytes have come, and after the last of them the peer was alive and the channel open. False:
            anything else, whatever it is; some bytes may have come. Nothing is written afterwards in either case.
        """


class RowsChannel(OneSidedChannel, Protocol):
    """A channel that has a shorter way for reads that are repeated."""

    def rows(self, source: Extents, destination: Extents, nbytes: int) -> Rows | None:
        """Prepares reads of ``nbytes`` of each of these tensors; None where there is no short way.

        Each side is all of its tensors, one run each; as many on both.
        """


class Units(Protocol):
    """``Rows`` of an owner who is asked."""

    def read(self, unit: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """Moves one unit of each of the owner's tensors to ``here`` bytes into ours.

        ``on_cut`` is told what ends the read, with a reason; None, when it has ended.

        Returns:
            As ``Rows.read``.
        """


class UnitsChannel(Channel, Protocol):
    """A channel that has a shorter way for reads that are repeated."""

    def units(self, head: bytes, destination: U64, nbytes: int) -> Units | None:
        """Prepares reads of ``nbytes`` of each tensor; None where there is no short way.

        Args:
            head: Followed by the number of a unit, 4 bytes, little-endian, it is the selector of a read.
            destination: (T,) uint64, our tensors.
            nbytes: Bytes of a unit of one tensor.
        """


class RegisteringChannel(PartialChannel, Protocol):
    """A channel to memory that its owner has registered with the same transport."""

    def admit(self, token: bytes) -> None:
        """Brings the regions of a token (of the peer's ``RegisteringTransport.register``) within reach.

        Called before ``covers`` for every transfer, so a token that is known already costs nothing. One
        that is no good is left out: ``covers`` then says no.
        """

    def holds(self, destination: Extents) -> bool:
        """Whether every byte of ``destination`` is within memory of ours that is registered. Does no I/O."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one cache.

    Attributes:
        bases: (T,) uint64, address of each tensor.
        nbytes: Bytes of each tensor.
        memory: What kind of memory it is, in the words of ``devices`` ("host").
    """

    bases: U64
    nbytes: int
    memory: str = "host"


class Transport(Protocol):
    """A data mover of one engine."""

    name: ClassVar[str]
    caps: ClassVar[TransportCaps]

    def endpoint(self, proof: bytes) -> bytes:
        """Opaque bytes that travel in one handshake and come back in the peer's ``PeerEndpoint.blob``.

        A transport by which a peer could be shown the memory of another process puts ``proof`` where only this
        process can and nobody can have it put: not at an address that the peer names, which may lie in a cache.

        Raises:
            TransportUnavailable: Not now; that peer is not offered it.
        """

    def hide(self, proof: bytes) -> None:
        """That handshake is over: the proof is no longer there. Of one that was not shown: nothing."""

    def open(self, peer: PeerEndpoint, *, deadline: float) -> Channel:
        """Proves that the peer can be read, and that it is the other end of the connection.

        Raises:
            TransportUnavailable: It cannot; the text is the reason shown to users.
        """

    def close(self) -> None:
        """Ends all channels, threads and descriptors. Idempotent."""


class RegisteringTransport(Transport, Protocol):
    """A transport that must know memory before it moves there or from there."""

    def register(self, region: Region) -> bytes:
        """Makes memory of ours known, as a destination and for peers; the token is for their ``admit``.

        Raises:
            RegistrationRefused: It cannot work with that memory; transfers of it go another way.
        """

    def unregister(self, token: bytes) -> None:
        """Forgets a region; peers that read it afterwards fail. An unknown token is fine."""


class Serving(Protocol):
    """One read that a peer was allowed: memory to send, and the check that it is still the same."""

    extents: Extents

    def check(self) -> Fault | None:
        """Whether the memory is still what was asked for: before the first and after the last byte."""

    def place_of(self, at: int) -> str:
        """Where a byte of the stream lies, in words for the reader, who may not know addresses."""

    def close(self) -> None:
        """The read is over, well or not. Idempotent."""


class ServedUnits(Protocol):
    """What selectors find that differ in nothing but their last four bytes, the number of a unit."""

    def send_now(self, unit: int, send: Callable[[Extents], None]) -> bool:
        """As ``ReadSource.send_now``; False: nothing was sent, ask there."""


class ReadSource(Protocol):
    """The owner's side of a transport that is not one-sided. The engine implements it."""

    def open(self, link_token: bytes, selector: bytes) -> Serving | Fault:
        """Finds, checks and pins what ``selector`` names. Does not block."""

    def send_now(self, link_token: bytes, selector: bytes, send: Callable[[Extents], None]) -> Fault | None:
        """Finds and checks what ``selector`` names and shows it to ``send``, all under one lock.

        For small answers: nothing can be withdrawn before ``send`` has returned, so nothing is pinned, and
        nothing need be checked afterwards. ``send`` neither blocks nor raises. Does not block.
        """

    def units(self, link_token: bytes, selector: bytes) -> ServedUnits | None:
        """Those like ``selector``; None where it does not end with the number of a unit, or is refused."""


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
