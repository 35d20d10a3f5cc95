"""P and D on either side of a slow link (10 MB/s), transport tcp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support import actors
from tests.support.netns import FULL_RATE, Namespace, joined, shape
from tests.support.pair import D_ID, P_ID, Combo, Pair
from tests.support.peers import Peer
from tests.support.pool import Spawner


class SlowPair(Pair):
    """A pair whose processes live in two namespaces; more peers can join either side."""

    nets: dict[str, Namespace]
    spawn: Spawner

    def up_slow(self, p_timeout_ms: int = 30_000, d_timeout_ms: int = 30_000, **more: str) -> SlowPair:
        self.address = self.listen(self.p, P_ID, "p", p_timeout_ms, **more)
        self.d.call(actors.up, D_ID, actors.options(self.combo.mode, "tcp", None, d_timeout_ms, **more))
        self.link()
        return self

    def listen(
        self, peer: Peer, cluster_id: int, side: str, timeout_ms: int = 30_000, **more: str
    ) -> tuple[str, int]:
        listen = f"{self.nets[side].address}:0"
        values = actors.options(self.combo.mode, "tcp", listen, timeout_ms, **more)
        address: tuple[str, int] = peer.call(actors.up, cluster_id, values)
        return address

    def full_speed(self) -> None:
        """From now on: what was in the middle, however busy the machine, is over soon."""
        for net in self.nets.values():
            shape(net, "change", FULL_RATE)

    def another(self, side: str) -> Peer:
        return self.spawn(prefix=self.nets[side].prefix)


@contextlib.contextmanager
def slow_pair(spawn: Spawner, mode: str) -> Iterator[SlowPair]:
    """Not initialised yet. The processes end before the namespaces do."""
    with joined() as (net_p, net_d):
        pair = SlowPair(spawn(prefix=net_p.prefix), spawn(prefix=net_d.prefix), Combo(mode, "tcp"))
        pair.nets = {"p": net_p, "d": net_d}
        pair.spawn = spawn
        yield pair
