"""A client that has TCP only, shows what it was told by others as its own, and then offers what is not its own."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from llm_datadist._link.connection import ends_of
from llm_datadist._link.seam import Address
from llm_datadist._wire.framing import encode
from llm_datadist._wire.messages import (
    CacheEntry,
    Confirm,
    Done,
    Established,
    Identity,
    KeyRef,
    Message,
    Offer,
    PartReady,
    Publish,
    Refused,
    Welcome,
    Word,
)
from llm_datadist._wire.proofs import proof_of
from tests.support import actors
from tests.support.raw_links import CHALLENGE, RawPeer, hello
from tests.support.world import World, wait_until

SECRET = b"what no peer was told of" * 8
NBYTES = 1024
MODEL_ID = 5


def keep_secret(w: World) -> int:
    """The address of something in the memory of a process."""
    w.extras["secret"] = ctypes.create_string_buffer(SECRET, NBYTES)
    return ctypes.addressof(w.extras["secret"])


def open_destination(w: World) -> None:
    """A cache that peers may push into."""
    actors.blocks_cache(w, "dst", model_id=MODEL_ID, accessible=True, tensors=1, dim0=4, stride=NBYTES)


def holds_secret(w: World) -> bool:
    return SECRET in w.held["dst"].whole().tobytes()


def told(w: World) -> list[tuple[str, str]]:
    return [(info.transport, "\n".join(info.reasons)) for info in w.dist.links()]


def has_no_link(w: World) -> bool:
    """Soon: its peer sees the end first."""
    return wait_until(lambda: not w.dist.links())


class Impostor(RawPeer):
    """One connection of it."""

    def greet(
        self, target_id: int, challenge: bytes = CHALLENGE, cluster_id: int = 9, instance: bytes = b"r" * 16
    ) -> Message | None:
        """Hello; what comes back."""
        me = Identity(cluster_id=cluster_id, instance=instance, role=1, accessible=True)
        self.say(hello(target_id, me, challenge))
        return self.hear()

    def welcomed(self, target_id: int, challenge: bytes = CHALLENGE) -> Welcome:
        welcome = self.greet(target_id, challenge)
        assert isinstance(welcome, Welcome)
        return welcome

    def show(self, endpoints: dict[str, bytes]) -> tuple[str, ...]:
        """By what the other side reads us now."""
        self.say(Confirm(reads_by=("local",), endpoints={**endpoints, "tcp": b""}))
        answer = self.hear()
        assert isinstance(answer, Established), answer
        return answer.reads_by

    def proof(self, welcome: Welcome) -> bytes:
        """What the other side looks for."""
        return proof_of(welcome.challenge, ends_of(self.sock))

    def publish(self, address: int, cache_id: int = 7, tensors: int = 1, stride: int = NBYTES) -> None:
        """Says that a cache of its own is there."""
        entry = CacheEntry(
            cache_id=cache_id,
            is_blocks=True,
            num_tensors=tensors,
            dim0=4,
            stride_nbytes=stride,
            word=Word(),
        )
        self.send(Publish(entry=entry), [address] * tensors)

    def offer(
        self, address: int, source_id: int = 7, tensors: int = 1, time_left_ms: int = 300
    ) -> Message | None:
        """Offers it as the source of a push; what comes of it."""
        value = struct.unpack_from("<Q", SECRET)[0]
        target = KeyRef(kind="blocks", model_id=MODEL_ID)
        offer = Offer(id=1, kind="blocks", source_id=source_id, target=target, part_tensors=tensors)
        self.send(offer, [0], [0], [])
        self.say(
            PartReady(
                id=2,
                offer_id=1,
                part=0,
                lease_id=1,
                lease=Word(address=address, value=value),
                time_left_ms=time_left_ms,
            )
        )
        while (answer := self.hear()) is not None and not isinstance(answer, (Done, Refused)):
            pass
        return answer

    def send(self, message: Any, *arrays: list[int]) -> None:
        chunks = encode(message, [np.array(array, dtype="<u8").tobytes() for array in arrays])
        self.sock.sendall(b"".join(bytes(chunk) for chunk in chunks))


def impostor(address: tuple[str, int]) -> Impostor:
    return Impostor(Address(*address))
