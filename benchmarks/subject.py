"""A reader and an owner process with the transports under test between them, without an engine."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.owner import OwnerProcess
from llm_datadist.testing.stream_owner import ExtentsSource, encode_extents, first_frame
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Channel, PeerEndpoint
from llm_datadist.transports.tcp import TcpTransport

_CALL_S = 120.0


class Subject:
    """T tensors of ``blocks`` blocks on both sides; ``pulled`` of them in independent random order."""

    def __init__(self, tensors: int, blocks: int, pulled: int, block_nbytes: int, threads: int) -> None:
        rng = np.random.default_rng(0)
        self.threads = threads
        self.nbytes = tensors * pulled * block_nbytes
        self.blocks = blocks
        self.block_nbytes = block_nbytes
        self.owner = OwnerProcess([sys.executable, "-m", "benchmarks.owner"], env=_environment())
        tensor_nbytes = blocks * block_nbytes
        self._memory = np.zeros((tensors, tensor_nbytes), np.uint8)
        theirs = np.array(self.owner.allocate([tensor_nbytes] * tensors, 1), np.uint64)
        ours = np.array([row.ctypes.data for row in self._memory], np.uint64)
        self.source_blocks = rng.permutation(blocks)[:pulled].astype(np.uint64)
        self.destination_blocks = rng.permutation(blocks)[:pulled].astype(np.uint64)
        self.source_bases = theirs
        self.source = self._extents(theirs, self.source_blocks)
        self.destination = self._extents(ours, self.destination_blocks)
        self._movers = Movers(threads - 1)

    def local(self) -> Callable[[], object]:
        """One pull over ``local``."""
        mine = LocalTransport(self._movers, lambda s, f: None, lambda s: None, False, secrets.token_bytes)
        blob = bytes.fromhex(self.owner.call("local_endpoint"))
        channel = mine.open(self._peer(blob, None), deadline=time.monotonic() + 5)
        return _reader(channel, lambda: Segments(self.source, self.destination))

    def tcp(self) -> Callable[[], object]:
        """One pull over ``tcp``."""
        token = secrets.token_bytes(16)
        host, port = self.owner.call("listen", token=token.hex())
        transport = TcpTransport(ExtentsSource(), first_frame, stripes=1)
        channel = transport.open(self._peer(b"", (host, port), token), deadline=0)
        selector = encode_extents(self.source)
        return _reader(channel, lambda: Segments(selector, self.destination))

    def pairs(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The same segments as (destination, source) iovecs, block by block."""
        count = len(self.source.bases) * len(self.source_blocks)
        both = []
        for bases, blocks in (
            (self.destination.bases, self.destination_blocks),
            (self.source.bases, self.source_blocks),
        ):
            table = np.empty((count, 2), np.uint64)
            table[:, 0] = (bases[:, None] + blocks * np.uint64(self.block_nbytes)).reshape(-1)
            table[:, 1] = self.block_nbytes
            both.append(table)
        return both[0], both[1]

    def close(self) -> None:
        """Ends the owner."""
        self.owner.kill()

    def _extents(self, bases: NDArray[np.uint64], blocks: NDArray[np.uint64]) -> Extents:
        nbytes = np.uint64(self.block_nbytes)
        return Extents.of(bases, blocks * nbytes, np.full(len(blocks), nbytes, np.uint64))

    def _peer(self, blob: bytes, address: tuple[str, int] | None, token: bytes = b"") -> PeerEndpoint:
        return PeerEndpoint(1, blob, token, address, lambda count: None)


def _reader(channel: Channel, plan: Callable[[], Segments]) -> Callable[[], object]:
    def run() -> None:
        progress = channel.read(plan()).wait(deadline=time.monotonic() + _CALL_S)
        if progress.fault is not None:
            raise RuntimeError(progress.fault.text)

    return run


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
