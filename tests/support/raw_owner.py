"""A peer made of a bare socket that accepts a link and offers what it is told to offer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping

import msgspec

from llm_datadist._link.seam import Address
from llm_datadist._wire.messages import Confirm, Established, Hello, Identity, Ping, Pong, Welcome
from tests.support.raw_links import RawPeer, listening_socket

LOCAL_NAME = b"\0llm-datadist/"
SHM_NAME = b"\0llm-datadist-shm/"


class _Answering(threading.Thread):
    def __init__(self, listener: socket.socket, identity: Identity, token: bytes) -> None:
        super().__init__(name="raw-owner", daemon=True)
        self._listener = listener
        self._identity = identity
        self._token = token

    def run(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with RawPeer(sock=sock) as peer:
                while (message := peer.hear()) is not None:
                    match message:
                        case Hello():
                            welcome = Welcome(
                                identity=self._identity, link_token=self._token, reads_by=("tcp",)
                            )
                            peer.say(welcome)
                        case Confirm():
                            peer.say(Established())
                        case Ping():
                            peer.say(Pong(id=message.id))


@contextlib.contextmanager
def raw_owner(
    endpoints: Mapping[str, bytes], cluster_id: int = 9, backend: str = "auto", token: bytes | None = None
) -> Iterator[Address]:
    """Where it can be dialled, in mode B; it ends with the link or the block."""
    identity = Identity(
        cluster_id=cluster_id,
        instance=os.urandom(16),
        role=1,
        accessible=True,
        backend=backend,
        endpoints=dict(endpoints),
    )
    with listening_socket() as (listener, address):
        answering = _Answering(listener, identity, token or os.urandom(16))
        answering.start()
        yield address
    answering.join(5)


def local_endpoint(name: bytes = LOCAL_NAME + b"nobody", address: int = 0, nonce: bytes = b"n" * 16) -> bytes:
    return msgspec.msgpack.encode({"name": name, "nonce_address": address, "nonce": nonce})


def shm_endpoint(
    name: bytes = SHM_NAME + b"nobody",
    secret: bytes = b"s" * 16,
    areas: tuple[tuple[int, int], ...] = ((4096, 4096),),
) -> bytes:
    return msgspec.msgpack.encode({"name": name, "secret": secret, "areas": areas})


@contextlib.contextmanager
def unix_listener(prefix: bytes, *, full: bool = False, kind: int = socket.SOCK_STREAM) -> Iterator[bytes]:
    """The name of an abstract UNIX socket of this process; ``full``: with no room in its queue."""
    name = prefix + os.urandom(8).hex().encode()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        listener.bind(name)
        listener.listen(0 if full else 8)
        while full:
            filler = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            filler.setblocking(False)
            try:
                filler.connect(name)
            except BlockingIOError:
                full = False
        yield name
