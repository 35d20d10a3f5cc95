"""One end of a pair of processes that move blocks with the Mooncake Transfer Engine over tcp.

Addresses and lengths are prepared outside the clock, and batches of several sizes are tried there: large
ones fail, small ones are slow. The fastest that works is used.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import lines
from mooncake.engine import TransferEngine

_BATCHES = (32, 128, 512)  # requests
_BATCH_NBYTES = 16 << 20
_TRIES = 2


class End:
    """Either end."""

    def __init__(self) -> None:
        self._memory: lines.Memory
        self._engine: Any
        self._target = ""
        self._batches: list[tuple[list[int], list[int], list[int]]] = []

    def own(self, tensors: int, blocks: int, block_nbytes: int, seed: int) -> dict[str, Any]:
        self._memory = lines.Memory(tensors, blocks, block_nbytes, seed)
        self._engine = TransferEngine()
        self._expect(self._engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", ""), "initialize")
        for address in self._memory.addresses:
            done = self._engine.register_memory(address, self._memory.tensor_nbytes)
            self._expect(done, "register_memory")
        target = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return {"address": target, "tensors": self._memory.addresses}

    def meet(self, address: str, tensors: list[int], source: list[int], destination: list[int]) -> None:
        size = self._memory.block_nbytes
        here = lines.blocks_of(self._memory.addresses, destination, size).tolist()
        there = lines.blocks_of(tensors, source, size).tolist()
        self._target = address
        tried = []
        for step in sorted({max(1, min(n, _BATCH_NBYTES // size, len(here))) for n in _BATCHES}):
            cuts = [slice(i, i + step) for i in range(0, len(here), step)]
            self._batches = [(here[cut], there[cut], [size] * len(here[cut])) for cut in cuts]
            with contextlib.suppress(RuntimeError):
                tried.append((min(self.turn()[0] for _ in range(_TRIES)), step, self._batches))
        if not tried:
            raise RuntimeError(f"no batch of {_BATCHES} requests of {size} bytes works")
        _, _, self._batches = min(tried)

    def turn(self) -> list[float]:
        begin = time.perf_counter()
        for batch in self._batches:
            self._expect(self._engine.batch_transfer_sync_read(self._target, *batch), "the transfer")
        return [time.perf_counter() - begin]

    def singles(self, calls: int) -> list[float]:
        return [self.turn()[0] for _ in range(calls)]

    def peek(self, tensor: int, block: int) -> str:
        return self._memory.peek(tensor, block)

    def _expect(self, result: int, what: str) -> None:
        if result != 0:
            raise RuntimeError(f"{what} gave {result}")


end = End()
lines.serve({name: getattr(end, name) for name in ("own", "meet", "turn", "singles", "peek")})
