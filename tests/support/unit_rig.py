"""An owner over TCP whose memory is blocks, and a reader that pulls them by units."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stream_owner import ExtentsServing, ExtentsSource
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_serving import ServedConnection
from tests.support.tcp_rig import CALL_S, U8, Rig, extents_of, memory_of

HEAD = b"the blocks, number "
TENSORS, BLOCKS, SIZE = 2, 8, 300
NBYTES = TENSORS * SIZE
STALE = Fault(FaultKind.REFUSED, "stale", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


class Blocks(ExtentsSource):
    """Blocks of some tensors; a selector is a head of the tests and the number of one.

    Attributes:
        plain: Selectors that were asked for in full.
        short: Units that were asked for shortly.
        stands: Whether units are what they were.
    """

    def __init__(self, memory: U8, size: int = SIZE) -> None:
        super().__init__()
        self.memory, self.size = memory, size
        self.plain: list[bytes] = []
        self.short: list[int] = []
        self.stands = True

    def block(self, unit: int) -> Extents:
        return extents_of(self.memory, [unit], self.size)

    def open(self, link_token: bytes, selector: bytes) -> ExtentsServing | Fault:
        self.plain.append(selector)
        if self.refusal is not None:
            return self.refusal
        self.open_count += 1
        return ExtentsServing(self, self.block(int.from_bytes(selector[-4:], "little")))

    def units(self, link_token: bytes, selector: bytes) -> Any:
        return _Units(self)


class _Units:
    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def send_now(self, unit: int, send: Callable[[Extents], None]) -> bool:
        if self._blocks.stands:
            self._blocks.short.append(unit)
            send(self._blocks.block(unit))
        return self._blocks.stands


class UnitRig(Rig):
    """A rig whose owner has blocks, and a reader of them that has a connection."""

    def __init__(self, tensors: int = TENSORS, size: int = SIZE, heads: tuple[bytes, ...] = (HEAD,)) -> None:
        super().__init__()
        self.there, self.here = memory_of(tensors, BLOCKS * size, 1), memory_of(tensors, BLOCKS * size, None)
        self.size = size
        self.blocks = Blocks(self.there, size)
        self.owner._server._source = self.source = self.blocks
        self.units = [self._units(head) for head in heads]
        self.plain()

    def _units(self, head: bytes) -> Any:
        bases = np.array([row.ctypes.data for row in self.here], np.uint64)
        return self.channel.units(head, bases, self.size)

    def plain(self, unit: int = 0) -> Any:
        """A plain read of a block to block 0."""
        plan = Segments(HEAD + unit.to_bytes(4, "little"), extents_of(self.here, [0], self.size))
        return self.channel.read(plan).wait(deadline=time.monotonic() + CALL_S)

    def pull(self, unit: int, to: int, of: int = 0, timeout_s: float = CALL_S) -> bool:
        """A read of a block; nothing else may have changed."""
        self.here[:] = 0xA5
        deadline, cuts = time.monotonic() + timeout_s, list[Any]()
        done: bool = self.units[of].read(unit, to * self.size, deadline=deadline, on_cut=cuts.append)
        assert not cuts or (len(cuts) == 2 and cuts[1] is None)
        expected = np.full_like(self.here, 0xA5)
        if done:
            columns = [slice(at * self.size, (at + 1) * self.size) for at in (unit, to)]
            expected[:, columns[1]] = self.there[:, columns[0]]
            assert np.array_equal(self.here, expected)
        return done

    @property
    def served(self) -> ServedConnection:
        """The owner's end of the only connection."""
        (connection,) = self.owner._server._connections.values()
        return connection

    @property
    def sockets(self) -> list[socket.socket]:
        return self.channel.pool.sockets()
