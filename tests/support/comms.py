"""What peers are told to do about comms (the two-sided link)."""

from __future__ import annotations

import time
from typing import Any

from llm_datadist import RegisterMemStatus
from tests.support import actors
from tests.support.pair import D_ID, P_ID, Pair
from tests.support.peers import Peer
from tests.support.world import World, wait_until

OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED
RANKS = {P_ID: 0, D_ID: 1}


def comm(w: World, table: str, ranks: dict[int, int] | None = None, name: str = "c") -> int:
    return int(w.dist.link(name, ranks or RANKS, table))


def status(w: World, comm_id: int) -> RegisterMemStatus:
    return w.dist.query_register_mem_status(comm_id)  # type: ignore[no-any-return]


def settled(w: World, comm_id: int, within: float) -> tuple[RegisterMemStatus, float]:
    """The final status, and when it was there by the monotonic clock."""
    wait_until(lambda: status(w, comm_id) is not PREPARING, within)
    return status(w, comm_id), time.monotonic()


def leave(w: World, comm_id: int) -> None:
    w.dist.unlink(comm_id)


def listen_address(w: World) -> Any:
    return w.dist.listen_address


def link_error(w: World, cluster_id: int) -> str | None:
    return w.dist.link_error(cluster_id)  # type: ignore[no-any-return]


def late_start(w: World, instant: float, values: dict[str, str], table: str) -> int:
    """init and link() at an instant of the monotonic clock."""
    time.sleep(max(0.0, instant - time.monotonic()))
    actors.up(w, P_ID, values)
    return comm(w, table)


def up_both(pair: Pair, **more: str) -> None:
    for peer, cluster_id in ((pair.p, P_ID), (pair.d, D_ID)):
        peer.call(actors.up, cluster_id, actors.options(pair.combo.mode, pair.combo.backend, **more))


def link_both(pair: Pair, table: str, ranks: dict[int, int] | None = None) -> tuple[int, int]:
    ids = tuple(peer.call(comm, table, ranks) for peer in (pair.p, pair.d))
    for peer, comm_id in zip((pair.p, pair.d), ids, strict=True):
        assert peer.call(settled, comm_id, 2.0)[0] is OK
    return ids  # type: ignore[return-value]


def ids_linked(peer: Peer) -> list[int]:
    return [i for i, _, _ in peer.call(actors.links)]
