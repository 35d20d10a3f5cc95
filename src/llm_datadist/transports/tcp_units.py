"""Reads of one unit of each of some tensors, again and again: what every such read repeats is made once.

Strategy: on an idle connection only. Without one, and whenever the answer is not the usual one, the read is
left to the plain way. Threads: any, several at once.
"""

from __future__ import annotations

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist.transports._sockets import Iovecs
from llm_datadist.transports.seam import Fault, FaultKind, OnCut
from llm_datadist.transports.tcp_frames import UnitRequests
from llm_datadist.transports.tcp_pool import ConnectionPool, Taker


class TcpUnits:
    """See ``seam.Units``.

    Attributes:
        requests: What is asked for.
    """

    __slots__ = ("_one", "_pool", "_table", "requests")

    def __init__(self, pool: ConnectionPool, head: bytes, bases: U64, nbytes: int) -> None:
        self._pool = pool
        self.requests = UnitRequests(head, nbytes * len(bases))
        self._table = np.full((len(bases), 2), nbytes, dtype=np.uint64)
        self._table[:, 0] = bases
        self._one = bases.item() if len(bases) == 1 else None  # without NumPy, for its latency

    def read(self, unit: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """One request, and its answer."""
        taker = _Reader(self._pool)
        with taker.during():
            try:
                connection = self._pool.take_idle(taker)
                if connection is None:
                    return False
                on_cut(taker.cancel)
                done = connection.read_unit(self, unit, here, deadline, alone=self._pool.readers == 1)
                on_cut(None)
                self._pool.give_back(taker, connection)
            except BaseException:  # an interrupt, which may come at any step of these
                self._pool.reclaim(taker)
                on_cut(None)
                raise
            return done

    def place(self, iovecs: Iovecs, here: int) -> None:
        """Adds where the unit goes."""
        nbytes = self.requests.nbytes
        if self._one is not None:
            iovecs.append(self._one + here, nbytes)
        else:
            iovecs.extend(self._table + np.array((here, 0), dtype=np.uint64), nbytes)


class _Reader(Taker):
    """A read under way."""

    __slots__ = ("_pool",)

    def __init__(self, pool: ConnectionPool) -> None:
        self.sock = self.cancelled = self._under_way = None
        self._pool = pool

    def cancel(self, reason: str) -> None:
        self._pool.cancel(self, Fault(FaultKind.CANCELLED, reason))
