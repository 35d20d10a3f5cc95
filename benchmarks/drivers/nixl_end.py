"""One end of a pair of processes that move blocks with NIXL, commanded by lines of JSON.

The strongest use that the library offers: descriptor lists and the request are prepared outside the clock,
a round posts the request and polls it. ``singles`` creates a request for each block, as a new one needs.
"""

from __future__ import annotations

import time
from typing import Any

import lines
import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

_LIMIT_S = 60.0


class End:
    """Either end."""

    def __init__(self) -> None:
        self._memory: lines.Memory
        self._agent: Any
        self._request: Any

    def own(self, tensors: int, blocks: int, block_nbytes: int, seed: int) -> dict[str, Any]:
        self._memory = lines.Memory(tensors, blocks, block_nbytes, seed)
        self._agent = nixl_agent(f"end{seed}", nixl_agent_config(backends=["UCX"]))
        regions = [(at, self._memory.tensor_nbytes, 0, "") for at in self._memory.addresses]
        self._agent.register_memory(regions, "DRAM")
        return {"address": self._agent.get_agent_metadata().hex(), "tensors": self._memory.addresses}

    def meet(self, address: str, tensors: list[int], source: list[int], destination: list[int]) -> None:
        peer = self._agent.add_remote_agent(bytes.fromhex(address))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        self._here = self._prepared("NIXL_INIT_AGENT", self._memory.addresses, destination)
        self._there = self._prepared(peer, tensors, source)
        self._count = len(tensors) * len(source)
        self._request = self._create()

    def turn(self) -> list[float]:
        begin = time.perf_counter()
        self._move(self._request)
        return [time.perf_counter() - begin]

    def singles(self, calls: int) -> list[float]:
        """Create, post and poll; released outside the clock."""
        seconds = []
        for _ in range(calls):
            begin = time.perf_counter()
            request = self._create()
            self._move(request)
            seconds.append(time.perf_counter() - begin)
            self._agent.release_xfer_handle(request)
        return seconds

    def peek(self, tensor: int, block: int) -> str:
        return self._memory.peek(tensor, block)

    def _prepared(self, name: str, bases: list[int], blocks: list[int]) -> Any:
        addresses = lines.blocks_of(bases, blocks, self._memory.block_nbytes)
        table = np.zeros((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1] = addresses, self._memory.block_nbytes
        return self._agent.prep_xfer_dlist(name, table, "DRAM")

    def _create(self) -> Any:
        indices = np.arange(self._count, dtype=np.int32)
        return self._agent.make_prepped_xfer("READ", self._here, indices, self._there, indices, b"")

    def _move(self, request: Any) -> None:
        state = self._agent.transfer(request)
        check = self._agent.check_xfer_state
        deadline = time.perf_counter() + _LIMIT_S
        while state == "PROC":
            state = check(request)
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no end after {_LIMIT_S:g} s")
        if state != "DONE":
            raise RuntimeError(f"the transfer ended with {state}")


end = End()
lines.serve({name: getattr(end, name) for name in ("own", "meet", "turn", "singles", "peek")})
