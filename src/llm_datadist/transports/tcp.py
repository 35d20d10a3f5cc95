"""The TCP transport: any two hosts, scatter/gather from and into the caller's memory.

Strategy: the reader asks for a byte range of a stream that a selector names, the owner's serving thread
answers in chunks. Connections come in through the engine's one listening port and are handed over here.
Invariants: connections of a link that is not open are closed; all that arrives is checked before use.
Threads: every method from any thread. One serving thread per transport, started on first use.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from llm_datadist._logs import get_logger
from llm_datadist.status import OutOfMemoryError
from llm_datadist.transports._sockets import tune
from llm_datadist.transports.seam import PeerEndpoint, ReadSource, TransportCaps, TransportUnavailable
from llm_datadist.transports.tcp_channel import Helpers, TcpChannel
from llm_datadist.transports.tcp_server import TcpServer, close_copy, refuse_first

logger = get_logger("llm_datadist.tcp")

DEFAULT_CONNECTIONS = 8  # per link, opened on demand
_MAX_STRIPES = 4  # one serving thread feeds them all


class TcpTransport:
    """Moves bytes over TCP; see ``seam.StreamTransport``.

    Args:
        source: What peers may read here.
        first_frame: (link token, whether we read) -> the encoded first frame of a data connection.
        connections: Most connections per link on which we read; 0 = the default.
        stripes: Most connections over which one wide read is spread; 0 = by machine (1 on two CPUs), and
            4 for a peer that is far away.
        clock: The time now, seconds of a monotonic clock.
    """

    name: ClassVar[str] = "tcp"
    caps: ClassVar[TransportCaps] = TransportCaps(one_sided=False, same_host_only=False, units=True)

    def __init__(
        self,
        source: ReadSource,
        first_frame: Callable[[bytes, bool], bytes],
        connections: int = 0,
        stripes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_frame = first_frame
        self._limit = connections or DEFAULT_CONNECTIONS
        self._stripes = min(self._limit, stripes or _stripes_by_machine())
        self._far_stripes = min(self._limit, stripes or _MAX_STRIPES)
        self._helpers = Helpers()
        self._clock = clock
        self._server = TcpServer(source)
        self._lock = threading.Lock()
        self._channels: dict[tuple[bytes, bool], TcpChannel] = {}
        self._closed = False

    def endpoint(self, proof: bytes) -> bytes:
        """Nothing: the address is the link's, and so is the secret that each connection shows."""
        return b""

    def hide(self, proof: bytes) -> None:
        """Nothing was shown."""

    def open(self, peer: PeerEndpoint, *, deadline: float) -> TcpChannel:
        """A channel to a peer. Does not block: the link itself shows that the peer can be reached.

        Raises:
            TransportUnavailable: The transport is closed.
            ValueError: This end of this link is open already.
        """
        channel = TcpChannel(
            peer,
            limit=self._limit,
            stripes=self._stripes,
            far_stripes=self._far_stripes,
            helpers=self._helpers,
            first_frame=self._first_frame,
            server=self._server,
            forget=self._forget,
            clock=self._clock,
        )
        with self._lock:
            if self._closed:
                raise TransportUnavailable("transport tcp of this process is closed")
            if (channel.token, channel.dialled) in self._channels:
                raise ValueError(f"the link to cluster {peer.cluster_id} is open already")
            self._channels[channel.token, channel.dialled] = channel
        return channel

    def adopt(self, sock: socket.socket, link_token: bytes, peer_reads: bool, leftover: bytes) -> None:
        """Takes over an accepted data connection; see the seam."""
        with self._lock:
            channel = self._channels.get((link_token, False))
        if channel is None:
            logger.debug("a data connection of a link that is not open is closed")
            sock.close()
            return
        try:
            tune(sock)
        except OSError:
            sock.close()
            return
        channel.adopt(sock, peer_reads, leftover)

    def refuse(self, sock: socket.socket, link_token: bytes, reason: str) -> None:
        """Tells the reader of an accepted data connection why it is not served."""
        with self._lock:
            known = (link_token, False) in self._channels
        if known:
            refuse_first(sock, OutOfMemoryError(f"a data connection cannot be accepted: {reason}"))

    def close(self) -> None:
        """Ends all channels, the serving thread and all descriptors. Idempotent."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
        self._server.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors. Takes no lock, tells the peers nothing."""
        for channel in list(self._channels.values()):
            for sock in channel.pool.sockets():
                close_copy(sock)
        self._server.close_after_fork()

    def _forget(self, channel: TcpChannel) -> None:
        with self._lock:
            if self._channels.get((channel.token, channel.dialled)) is channel:
                del self._channels[channel.token, channel.dialled]


def _stripes_by_machine() -> int:
    return max(1, min(_MAX_STRIPES, len(os.sched_getaffinity(0)) // 2))
