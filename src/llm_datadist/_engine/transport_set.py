"""The transports of one engine: which there can be, which there are, and what peers are offered."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from llm_datadist._core.selection import AUTO
from llm_datadist._engine.state import State
from llm_datadist._logs import get_logger
from llm_datadist._shortages import failure_of, is_shortage, reason_of
from llm_datadist._wire.framing import encode
from llm_datadist._wire.messages import PROTOCOL_VERSION, DataHello
from llm_datadist.devices.shared_memory import NotSharable
from llm_datadist.status import FeatureNotEnabledError
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.nixl import NixlTransport, check_worth_it
from llm_datadist.transports.seam import ReadSource, Transport, TransportCaps, TransportUnavailable
from llm_datadist.transports.shm import ShmTransport
from llm_datadist.transports.tcp import TcpTransport

_LOG = get_logger("llm_datadist.link")
_TRANSPORTS: tuple[type[Transport], ...] = (ShmTransport, LocalTransport, NixlTransport, TcpTransport)
WORDS = "words"  # an endpoint beside those of the transports: where words alone are shared by ``shm``
CAPS: dict[str, TransportCaps] = {kind.name: kind.caps for kind in _TRANSPORTS}


class TransportSet:
    """Built with the engine, opened with its start.

    Attributes:
        opened: By name.
        missing: Name -> why that one is not to be had here.
        stream: The one whose connections come in through the listening port.
        words: The one that shares words, and reads a peer's, beside any other of this host.
    """

    def __init__(self, state: State, movers: Movers, source: ReadSource) -> None:
        self._state = state
        self._movers = movers
        self.opened: dict[str, Transport] = {}
        self.missing: dict[str, str] = {}
        self.words: ShmTransport | None = None
        self.stream = TcpTransport(source, _first_data_frame, state.options.tcp_connections)

    def open(self) -> None:
        """Opens those that may be chosen.

        Raises:
            FeatureNotEnabledError: The one that is forced is not to be had here.
        """
        if self._wants(ShmTransport) or self._wants(LocalTransport):
            self._open_shm()
        if self._wants(LocalTransport):
            self._open_local()
        self._open_nixl()
        if self._wants(TcpTransport):
            self.opened[TcpTransport.name] = self.stream
        backend = self._state.options.backend
        if backend in self.missing:
            raise FeatureNotEnabledError(
                f"llm.TransferBackend (LLMConfig.transfer_backend) is {backend!r}, which is not to be had here: "
                f"{self.missing[backend]}; use 'auto' for what there is"
            )

    def show(self, proof: bytes) -> dict[str, bytes]:
        """What one peer is told, by name; it finds ``proof`` there until ``hide``."""
        offered: dict[str, Transport] = {n: t for n, t in self.opened.items() if self._offers(n)}
        if self.words is not None:
            offered[WORDS] = self.words
        endpoints = {}
        for name, transport in offered.items():
            try:
                endpoints[name] = transport.endpoint(proof)
            except TransportUnavailable as exc:
                _LOG.info("transport %s is not offered to a peer: %s", name, exc)
        return endpoints

    def hide(self, proof: bytes) -> None:
        """The handshake is over."""
        for transport in self._all():
            transport.hide(proof)

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        for transport in self._all():
            transport.close()

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors."""
        for transport in self._all():
            close = getattr(transport, "close_after_fork", None)
            if close is not None:
                close()

    def _all(self) -> tuple[Transport, ...]:
        return (*self.opened.values(), self.stream, *((self.words,) if self.words else ()))

    def _wants(self, kind: type[Transport]) -> bool:
        return self._state.options.backend in (AUTO, kind.name)

    def _offers(self, name: str) -> bool:
        """Without a pool there is nothing that a peer would read by ``shm``."""
        return name != ShmTransport.name or bool(self._state.pools.areas) or not self._wants(LocalTransport)

    @contextmanager
    def _or_without(self, kind: type[Transport]) -> Iterator[None]:
        """The engine does without one that this system does not have; the reason is noted.

        Raises:
            OutOfMemoryError: Something is short now: with it there would be that transport, a moment later.
        """
        try:
            yield
        except (TransportUnavailable, NotSharable) as exc:
            self.missing[kind.name] = str(exc)
        except OSError as exc:
            if is_shortage(exc):
                raise failure_of(f"transport {kind.name} cannot be opened", exc) from exc
            self.missing[kind.name] = f"this system does not let it be opened: {reason_of(exc)}"

    def _open_local(self) -> None:
        links, options = self._state.links, self._state.options
        with self._or_without(LocalTransport):
            self.opened[LocalTransport.name] = LocalTransport(
                self._movers, links.add_reader, links.remove_reader, options.allow_ptrace, secrets.token_bytes
            )

    def _open_shm(self) -> None:
        state, links = self._state, self._state.links
        with self._or_without(ShmTransport):
            if self._wants(ShmTransport):
                self._see_pools()
            areas = (state.slab.area, *state.pools.areas)
            self.words = ShmTransport(
                areas, self._movers, links.add_reader, links.remove_reader, secrets.token_bytes
            )
            if self._wants(ShmTransport):
                self.opened[ShmTransport.name] = self.words

    def _see_pools(self) -> None:
        """A pool that cannot be shared is read some other way, unless that is forbidden.

        Raises:
            NotSharable: It is; the text says what is wrong.
            OSError: Likewise, and it may be had a moment later.
        """
        for name, why in self._state.pools.unshared.items():
            if self._state.options.backend == AUTO:
                _LOG.info("the pool of %s is not read by transport shm: %s", name, why)
                continue
            if isinstance(why.__cause__, OSError) and is_shortage(why.__cause__):
                raise why.__cause__
            raise NotSharable(f"the pool of {name} cannot be shared: {why}") from why

    def _open_nixl(self) -> None:
        """What every peer is told of before it has a link are words; pools it hears of with the first cache in them."""
        state = self._state
        if not self._wants(NixlTransport):
            return
        with self._or_without(NixlTransport):
            if state.options.backend == AUTO:
                check_worth_it()
            self._use_nixl(NixlTransport(secrets.token_bytes))

    def _use_nixl(self, transport: NixlTransport) -> None:
        state = self._state
        self.opened[NixlTransport.name] = transport
        state.regions.use(transport)
        address, nbytes = state.slab.bounds
        state.regions.register(np.array([address], dtype=np.uint64), nbytes)
        transport.offer()
        for placement, (address, nbytes) in state.pools.bounds.items():
            state.regions.add_pool(placement, address, nbytes)


def _first_data_frame(link_token: bytes, dialler_reads: bool) -> bytes:
    return b"".join(
        encode(DataHello(version=PROTOCOL_VERSION, link_token=link_token, dialler_reads=dialler_reads))
    )
