"""Peers made of bare sockets: ones that speak as told, stay silent, or never accept."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from llm_datadist._link.seam import Address
from llm_datadist._wire.framing import Decoder, encode
from llm_datadist._wire.messages import (
    PROTOCOL_VERSION,
    Confirm,
    Heartbeat,
    Hello,
    Identity,
    Message,
    Welcome,
)


class RawPeer:
    """A peer made of a bare socket; ``at``: its own address, if that matters."""

    def __init__(
        self, address: Address | None = None, *, sock: socket.socket | None = None, at: str = ""
    ) -> None:
        if sock is None:
            assert address is not None
            sock = socket.create_connection(
                (address.host, address.port), source_address=(at, 0) if at else None
            )
        self.sock = sock
        self.sock.settimeout(5)
        self._decoder = Decoder(64 << 20)
        self._frames: list[Message] = []

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.sock.sendall(b"".join(bytes(chunk) for chunk in encode(message)))

    def hear(self) -> Message | None:
        """The next message but heartbeats, which come when they will; None at the end of the stream."""
        while not self._frames:
            try:
                data = self.sock.recv(65536)
            except ConnectionError:
                return None
            if not data:
                return None
            said = [frame.message for frame in self._decoder.feed(data)]
            self._frames += [message for message in said if not isinstance(message, Heartbeat)]
        return self._frames.pop(0)

    def link(self, target_id: int, cluster_id: int = 9, instance: bytes = b"r" * 16, **options: int) -> None:
        self.say(hello(target_id, identity(cluster_id, instance, **options)))
        assert isinstance(self.hear(), Welcome)
        self.say(Confirm(reads_by=("x",)))
        self.hear()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


CHALLENGE = b"c" * 16


def hello(target_id: int, me: Identity, challenge: bytes = CHALLENGE) -> Hello:
    return Hello(version=PROTOCOL_VERSION, target_id=target_id, identity=me, challenge=challenge)


def identity(cluster_id: int = 9, instance: bytes = b"r" * 16, **options: int) -> Identity:
    return Identity(cluster_id=cluster_id, instance=instance, role=1, accessible=False, **options)


@contextlib.contextmanager
def listening_socket(backlog: int = 8) -> Iterator[tuple[socket.socket, Address]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(backlog)
        sock.settimeout(5)
        yield sock, Address("127.0.0.1", sock.getsockname()[1])


@contextlib.contextmanager
def swallowing_address() -> Iterator[Address]:
    with listening_socket(0) as (_, address), contextlib.ExitStack() as stack:
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((address.host, address.port))
        yield address
