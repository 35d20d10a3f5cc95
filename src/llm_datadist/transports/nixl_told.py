"""What a peer tells of itself for transport ``nixl``: in the handshake, and with each cache.

Everything in it is the peer's word. What NIXL is to parse is checked against the rest (``nixl_metadata``).
"""

from __future__ import annotations

import threading
from typing import Annotated

import msgspec
import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.segments import U64
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.transports._nixl import knows
from llm_datadist.transports.nixl_metadata import BadMetadata, check
from llm_datadist.transports.nixl_ranges import Ranges
from llm_datadist.transports.nixl_session import Source

ID_NBYTES = 16
ALWAYS = 1 << 62  # number of what came with the handshake
Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer finds an agent, proves that it is the right one and sees that it lives, and reads its words."""

    agent: str
    proof: bytes
    proof_address: Address
    nonce_address: Address
    nonce: bytes
    rows: bytes  # (n, 2) little-endian uint64: start and end
    metadata: bytes


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """What follows the id of a token."""

    agent: str
    memory: str
    rows: bytes
    metadata: bytes


def places_of(endpoint: Endpoint) -> U64:
    """Where the proof and the nonce are."""
    starts = np.array([endpoint.proof_address, endpoint.nonce_address], dtype=np.uint64)
    return np.stack((starts, starts + np.uint64(PROOF_NBYTES)), axis=1)


def source_of(
    name: bytes, agent: str, memory: str, rows: bytes, metadata: bytes, number: int
) -> Source | str:
    """A source as a peer has told of it; or what is wrong with it."""
    if len(rows) % 16 or len(rows) > 16 * limits.NIXL_TENSORS or len(metadata) > limits.NIXL_METADATA_NBYTES:
        return f"{len(rows)} bytes of ranges and {len(metadata)} of metadata"
    if not knows(memory):
        return f"memory {memory!r}"
    ranges = Ranges(np.frombuffer(rows, dtype="<u8").astype(np.uint64).reshape(-1, 2))
    try:
        check(metadata, agent, memory, ranges.pairs, connection=number == ALWAYS)
    except BadMetadata as exc:
        return str(exc)
    low, high = (int(ranges.pairs[:, 0].min()), int(ranges.pairs[:, 1].max())) if len(rows) else (0, 0)
    return Source(name, memory, ranges, low, high, metadata, number)


class Held:
    """How many bytes all links of an engine keep of what their peers have told. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """So many more; less if negative."""
        with self._lock:
            self.nbytes += nbytes
