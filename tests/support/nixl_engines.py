"""Processes whose engines use transport ``nixl`` with NIXL itself, on one host or in two networks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support import actors
from tests.support.netns import Namespace, joined
from tests.support.pair import D_ID, P_ID, Combo, Pair
from tests.support.peers import Peer
from tests.support.pool import Spawner

NIXL_A, NIXL_B = Combo("A", "nixl"), Combo("B", "nixl")
BOTH = (NIXL_A, NIXL_B)
OVER_TCP = {"UCX_TLS": "tcp"}
QUIET: dict[str, str | None] = {
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "fatal",
}  # of peers that were killed


def net_peer(spawn: Spawner, net: Namespace, **env: str) -> Peer:
    """A process in a network, with UCX on that network's device."""
    return spawn(prefix=net.prefix, env={**OVER_TCP, "UCX_NET_DEVICES": net.device, **env})


class NetPair(Pair):
    """P and D in networks of their own."""

    nets: tuple[Namespace, Namespace]

    def up_there(self, p_timeout_ms: int = 30_000, d_timeout_ms: int = 30_000, **more: str) -> NetPair:
        mode, backend = self.combo.mode, self.combo.backend
        listen = f"{self.nets[0].address}:0"
        self.address = self.p.call(
            actors.up, P_ID, actors.options(mode, backend, listen, p_timeout_ms, **more)
        )
        self.d.call(actors.up, D_ID, actors.options(mode, backend, None, d_timeout_ms, **more))
        self.link()
        return self


@contextlib.contextmanager
def net_pair(spawn: Spawner, combo: Combo, *, slow: bool = True, **env: str) -> Iterator[NetPair]:
    """Not initialised yet; 10 MB/s each way if slow."""
    with joined(slow=slow) as nets:
        pair = NetPair(*(net_peer(spawn, net, **env) for net in nets), combo)
        pair.nets = nets
        yield pair
