"""The seam between the control plane and the engine: what the links tell it and ask it.

Thread rule: every method of ``LinkHandler`` is called on the control thread and must not block.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from llm_datadist._wire.messages import DataHello, Identity

if TYPE_CHECKING:
    from llm_datadist._link.connection import Connection
    from llm_datadist._link.hosts import Hosts
    from llm_datadist._link.link import Link
    from llm_datadist._link.outbox import Outbox
    from llm_datadist._wire.framing import Frame
    from llm_datadist._wire.session import Event

DataSocket: TypeAlias = socket.socket


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or to dial: a host (name, IPv4, IPv6 without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Target:
    """One cluster to dial."""

    cluster_id: int
    address: Address


@dataclass(frozen=True, slots=True)
class Showing:
    """How a peer says that it can be read.

    Attributes:
        endpoints: Transport name -> what its side of that transport gave for this connection.
        proof: What must be found there; see ``_wire.proofs``.
        within_host: Whether its connection comes from this host.
    """

    endpoints: Mapping[str, bytes]
    proof: bytes
    within_host: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine can read that peer.

    Attributes:
        reads_by: Names of the transports chosen, best first.
        context: The engine's own, kept at ``Link.context``.
    """

    reads_by: tuple[str, ...]
    context: object


@dataclass(frozen=True, slots=True)
class Unusable:
    """The engine refuses that peer (mode, forced transport): code and text of the refusal."""

    code: int
    text: str


class SocketCalls(Protocol):
    """Calls on a connection that never wait and keep the GIL.

    Whoever gives the GIL up waits 5 ms to have it back beside a thread that runs Python without a pause.

    Attributes:
        nbytes: At most, of one call: what takes no longer than a few steps of Python.
    """

    nbytes: int

    def send(self, fd: int, outbox: Outbox) -> None:
        """Sends what the socket takes now, and notes in the outbox how much that was.

        Raises:
            OSError: As the system reports it; never BlockingIOError.
        """

    def receive(self, fd: int) -> bytes | None:
        """What has come, up to ``nbytes``; empty at the end of the stream, None if nothing is there yet.

        On the control thread.

        Raises:
            OSError: As for ``send``.
        """


class ConnectionOwner(Protocol):
    """What a connection reports to. Called on the control thread.

    Attributes:
        hosts: Who has how much of that thread's time.
    """

    hosts: Hosts

    def on_event(self, conn: Connection, event: Event) -> None:
        """Any event of the session but Closed."""

    def on_closed(
        self, conn: Connection, reason: str, *, error: bool, cause: BaseException | None = None
    ) -> None:
        """The connection is gone. ``error``: the peer broke the protocol. ``cause``: what the system said."""

    def on_bug(self, conn: Connection) -> None:
        """An event could not be handled: the exception that is being handled is a fault of this side."""

    def waiting_nbytes(self, of: Callable[[Connection], int]) -> int:
        """The sum for all connections. From any thread."""


class LinkHandler(Protocol):
    """What the engine does for the control plane."""

    def show(self, proof: bytes) -> dict[str, bytes]:
        """Puts ``proof`` where only this process can; the endpoints for the peer that must find it there."""

    def hide(self, proof: bytes) -> None:
        """Nobody looks for that proof any more (exactly once per ``show``)."""

    def prepare(
        self,
        peer: Identity,
        showing: Showing,
        link_token: bytes,
        address: Address | None,
        ask_for_connections: Callable[[int], None],
    ) -> Prepared | Unusable:
        """Opens the channel to a peer in the handshake. ``address``: what we dialled, None if dialled."""

    def discard(self, prepared: Prepared) -> None:
        """The handshake failed after ``prepare``; no ``on_up`` will follow."""

    def on_up(self, link: Link) -> None:
        """The link is up; what is posted here is the first that the peer gets."""

    def on_message(self, link: Link, frame: Frame) -> None:
        """A message that no caller waits for: requests, announcements, late answers."""

    def on_down(self, link: Link, reason: str) -> None:
        """The link is gone (exactly once per ``on_up``)."""

    def on_data_socket(self, sock: DataSocket, hello: DataHello, leftover: bytes) -> None:
        """A data connection came in; the socket is the handler's now."""

    def refuse_data_socket(self, sock: DataSocket, hello: DataHello, reason: str) -> None:
        """One came in for which there is no descriptor, and is closed after this. Does not block."""
