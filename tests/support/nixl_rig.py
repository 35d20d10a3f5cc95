"""An owner and a reader of transport ``nixl`` whose agents are not NIXL's."""

from __future__ import annotations

import itertools
import time

import numpy as np

from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import extents
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_channel import NixlChannel
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint, Progress, Region
from tests.support.fake_nixl import World, buffer
from tests.support.local_pair import PROOF

SIZE = 4096


class Rig:
    """An owner and a reader in one world, with a buffer each."""

    def __init__(self, linger_s: float = 0.05) -> None:
        self.world = World()
        seed = itertools.count(1)

        def unique(n: int) -> bytes:
            return next(seed).to_bytes(n, "big")

        self.owner = NixlTransport(unique, agents=self.world.agents)
        self.reader = NixlTransport(unique, linger_s, agents=self.world.agents)
        self.there, self.source = buffer(4 * SIZE)
        self.there[:] = np.arange(4 * SIZE) % 251
        self.here, self.destination = buffer(4 * SIZE)
        self.own = self.reader.register(region(self.destination, nbytes=4 * SIZE))
        self.channel = self.open()

    def close(self) -> None:
        self.reader.close()
        self.owner.close()
        assert not self.world.living

    def open(self) -> NixlChannel:
        return self.reader.open(endpoint(self.owner.endpoint(PROOF)), deadline=time.monotonic() + 10)

    def tell(self, *bases: int, nbytes: int) -> bytes:
        token = self.owner.register(region(*bases, nbytes=nbytes))
        self.channel.admit(token)
        return token

    def plan(self, at: int = 0, nbytes: int = SIZE, to: int = 0) -> Segments:
        return Segments(
            extents([self.source + at], [(0, nbytes)]), extents([self.destination + to], [(0, nbytes)])
        )

    def read(self, at: int = 0, nbytes: int = SIZE, *, time_s: float = 10) -> Progress:
        return self.channel.read(self.plan(at, nbytes)).wait(deadline=time.monotonic() + time_s)

    def check(self, at: int = 0, nbytes: int = SIZE) -> None:
        self.here[:] = 0
        assert self.read(at, nbytes) == Progress(nbytes)
        assert np.array_equal(self.here[:nbytes], self.there[at : at + nbytes])
        assert not self.here[nbytes:].any()


def region(*bases: int, nbytes: int, memory: str = "host") -> Region:
    return Region(np.array(bases, dtype=np.uint64), nbytes, memory)


def endpoint(blob: bytes) -> PeerEndpoint:
    return PeerEndpoint(1, blob, b"", None, lambda count: None, PROOF)


def kind_of(answer: Progress | int | Fault) -> FaultKind:
    fault = answer.fault if isinstance(answer, Progress) else answer
    assert isinstance(fault, Fault), answer
    assert fault.text
    return fault.kind
