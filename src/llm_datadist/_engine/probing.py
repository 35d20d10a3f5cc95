"""Which transports read a new peer: opens the candidates in a handshake, and says why each was taken or not.

Runs on the control thread: ``Transport.open`` must not wait for the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

from llm_datadist._core.selection import Choice, candidates, choose
from llm_datadist._engine.state import Peer
from llm_datadist._engine.transport_set import CAPS, WORDS, TransportSet
from llm_datadist._engine.ways import Way
from llm_datadist._logs import get_logger
from llm_datadist._shortages import reason_of
from llm_datadist._wire.messages import Identity
from llm_datadist.transports.seam import (
    Channel,
    PeerEndpoint,
    StreamChannel,
    Transport,
    TransportUnavailable,
    WordChannel,
)

_LOG = get_logger("llm_datadist.link")
_PROBE_S = 1.0  # for Transport.open in a handshake; on one host it takes microseconds
_PARTIAL = frozenset(name for name, caps in CAPS.items() if caps.partial)


@dataclass(slots=True)
class Probing:
    """What is found out about one peer.

    Attributes:
        transports: Of the engine.
        backend: The transport that it forces, or "auto".
        peer: The other side, as it has introduced itself.
        offered: Its endpoints by transport name.
        endpoint: Makes what a transport needs to know of it.
    """

    transports: TransportSet
    backend: str
    peer: Identity
    offered: Mapping[str, bytes]
    endpoint: Callable[[str], PeerEndpoint]
    _ways: list[Way] = field(default_factory=list)
    _refusals: dict[str, str] = field(default_factory=dict)
    _undo: ExitStack = field(default_factory=ExitStack)

    def run(self) -> tuple[Choice, Peer | None]:
        """What was chosen, and the peer with the ways to it unless there is none."""
        with ExitStack() as self._undo:
            choice, peer = self._run()
            if peer is not None:
                self._undo.pop_all()
        return choice, peer

    def _run(self) -> tuple[Choice, Peer | None]:
        self._open_ways()
        serving = self._open_stream()
        choice = self._choose()
        if not choice.names:
            return choice, None
        if self._refusals:
            _LOG.info(
                "cluster %d is read by %s: %s",
                self.peer.cluster_id, "+".join(choice.names), "; ".join(choice.reasons),
            )  # fmt: skip
        words = self._open_words()
        if serving is not None and self.transports.stream.name in choice.names:
            self._ways.append(Way.of(self.transports.stream, serving))
        return choice, Peer(tuple(self._ways), choice.reasons, serving, words)

    def _open_ways(self) -> None:
        """Opens until one reaches all memory; the stream transport's channel is opened in any case, later."""
        opened = self.transports.opened
        for name in candidates(tuple(opened), self.backend, self.peer.backend):
            if name == self.transports.stream.name:
                return
            if name not in self.offered:
                continue
            channel = self._open(opened[name], name)
            if channel is None:
                continue
            self._ways.append(Way.of(opened[name], channel))
            if name not in _PARTIAL:
                return

    def _open_stream(self) -> StreamChannel | None:
        """Whatever we read the peer by: rights are per direction, and it may need connections where we do not."""
        stream = self.transports.stream
        if stream.name not in self.transports.opened or stream.name not in self.offered:
            return None
        return cast("StreamChannel | None", self._open(stream, stream.name))

    def _open(self, transport: Transport, endpoint: str) -> Channel | None:
        """One channel, closed again if nothing comes of it all; None, with the reason noted, if it cannot be had."""
        try:
            channel = transport.open(self.endpoint(endpoint), deadline=_soon())
        except TransportUnavailable as exc:
            self._refusals[endpoint] = str(exc)
        except (OSError, MemoryError) as exc:
            self._refusals[endpoint] = f"it cannot be opened: {reason_of(exc)}"
        else:
            self._undo.callback(channel.close)
            return channel
        return None

    def _choose(self) -> Choice:
        missing = self.transports.missing
        return choose(
            (*self.transports.opened, *missing),
            self.offered,
            self.backend,
            self.peer.backend,
            {**missing, **self._refusals},
            _PARTIAL,
        )

    def _open_words(self) -> WordChannel | None:
        """Where bytes are read by the kernel, words are read faster in a mapping, if the peer gives us one."""
        if self.transports.words is None or WORDS not in self.offered:
            return None
        if not self._ways or not self._ways[-1].caps.same_host_only:
            return None
        if self._ways[0].name == self.transports.words.name:
            return cast(WordChannel, self._ways[0].channel)
        return cast("WordChannel | None", self._open(self.transports.words, WORDS))


def _soon() -> float:
    return time.monotonic() + _PROBE_S
