"""A peer made of a bare socket that accepts a link and offers what it is told to offer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import msgspec

from llm_datadist._link.connection import ends_of
from llm_datadist._link.seam import Address
from llm_datadist._wire.messages import Confirm, Established, Hello, Identity, Ping, Pong, Welcome
from llm_datadist._wire.proofs import proof_of
from llm_datadist.transports.local import _prefix
from tests.support.raw_links import RawPeer, listening_socket

LOCAL_NAME = b"\0llm-datadist/"
SHM_NAME = b"\0llm-datadist-shm/"
SALT = b"s" * 16
OTHER_PROOF = b"p" * 32
Endpoint = bytes | Callable[[bytes], bytes]  # as it is, or made of the proof that the peer looks for


class _Answering(threading.Thread):
    def __init__(
        self, listener: socket.socket, identity: Identity, endpoints: Mapping[str, Endpoint]
    ) -> None:
        super().__init__(name="raw-owner", daemon=True)
        self._listener = listener
        self._identity = identity
        self._endpoints = endpoints

    def run(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with RawPeer(sock=sock) as peer:
                while (message := peer.hear()) is not None:
                    match message:
                        case Hello(challenge=challenge):
                            proof = proof_of(challenge, ends_of(sock))
                            told = {
                                n: e if isinstance(e, bytes) else e(proof) for n, e in self._endpoints.items()
                            }
                            peer.say(
                                Welcome(
                                    identity=self._identity,
                                    seed=os.urandom(16),
                                    challenge=os.urandom(16),
                                    endpoints=told,
                                )
                            )
                        case Confirm():
                            peer.say(Established(reads_by=("tcp",)))
                        case Ping():
                            peer.say(Pong(id=message.id))


@contextlib.contextmanager
def raw_owner(
    endpoints: Mapping[str, Endpoint], cluster_id: int = 9, backend: str = "auto"
) -> Iterator[Address]:
    """Where it can be dialled, in mode B; it ends with the link or the block."""
    identity = Identity(
        cluster_id=cluster_id,
        instance=os.urandom(16),
        role=1,
        accessible=True,
        backend=backend,
    )
    with listening_socket() as (listener, address):
        answering = _Answering(listener, identity, endpoints)
        answering.start()
        yield address
    answering.join(5)


def local_name(page: int = 4096) -> bytes:
    """How the name of a process begins that has its proofs there."""
    return _prefix(SALT, page)


def local_endpoint(
    name: bytes = local_name() + b"nobody", page: int = 4096, proof: bytes = OTHER_PROOF
) -> bytes:
    return msgspec.msgpack.encode({"name": name, "salt": SALT, "page": page, "slot": 0, "proof": proof})


def shm_endpoint(
    name: bytes = SHM_NAME + b"nobody",
    proof: bytes = OTHER_PROOF,
    areas: tuple[tuple[int, int], ...] = ((4096, 4096),),
) -> bytes:
    return msgspec.msgpack.encode({"name": name, "proof": proof, "areas": areas})


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
