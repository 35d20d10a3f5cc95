"""What the control plane tells the engine: handshakes, messages, links that come and go.

Runs on the control thread: everything that may block is handed to a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llm_datadist._engine import codec
from llm_datadist._engine.asked import Asked
from llm_datadist._engine.catalog import Catalog
from llm_datadist._engine.draining import Draining
from llm_datadist._engine.endings import Endings
from llm_datadist._engine.linking import Linking
from llm_datadist._engine.obligations import give_back
from llm_datadist._engine.probing import Probing
from llm_datadist._engine.receiver import Receiver
from llm_datadist._engine.responder import Responder
from llm_datadist._engine.state import Peer, State, describe, peer_of
from llm_datadist._engine.transport_set import TransportSet
from llm_datadist._link.link import Link
from llm_datadist._link.seam import Address, DataSocket, Prepared, Showing, Unusable
from llm_datadist._logs import get_logger
from llm_datadist._wire.framing import Frame, ProtocolError
from llm_datadist._wire.messages import (
    Announce,
    DataHello,
    Decided,
    Done,
    EndOffer,
    Finish,
    Found,
    Grant,
    Identity,
    Lookup,
    NeedConnections,
    Offer,
    PartReady,
    Pong,
    Publish,
    Release,
    Resolve,
    Settle,
    Unlink,
    Withdraw,
)
from llm_datadist.status import LinkFailedError, LLMStatusCode
from llm_datadist.transports.seam import PeerEndpoint

_LOG = get_logger("llm_datadist.link")


class Handler:
    """Implements ``_link.seam.LinkHandler``."""

    def __init__(
        self,
        state: State,
        transports: TransportSet,
        catalog: Catalog,
        responder: Responder,
        receiver: Receiver,
        linking: Linking,
        draining: Draining,
        endings: Endings,
    ) -> None:
        self._state = state
        self._transports = transports
        self._catalog = catalog
        self._responder = responder
        self._receiver = receiver
        self._linking = linking
        self._draining = draining
        self._endings = endings
        self._asked = Asked(state)

    # ---- handshake ----------------------------------------------------------------------------------------

    def show(self, proof: bytes) -> dict[str, bytes]:
        """How this peer can read us."""
        return self._transports.show(proof)

    def hide(self, proof: bytes) -> None:
        """It has looked."""
        self._transports.hide(proof)

    def prepare(
        self,
        peer: Identity,
        showing: Showing,
        link_token: bytes,
        address: Address | None,
        ask_for_connections: Callable[[int], None],
    ) -> Prepared | Unusable:
        """Chooses the transport by which we read this peer and opens its channel."""
        dialled = (address.host, address.port) if address else None

        def endpoint(name: str) -> PeerEndpoint:
            return PeerEndpoint(
                peer.cluster_id,
                showing.endpoints[name],
                link_token,
                dialled,
                ask_for_connections,
                showing.proof,
                showing.within_host,
            )

        backend = self._state.options.backend
        choice, context = Probing(self._transports, backend, peer, showing.endpoints, endpoint).run()
        if context is None:
            reasons = "; ".join(choice.reasons)
            text = f"no transport reads cluster {peer.cluster_id} from cluster {self._state.cluster_id}: {reasons}"
            return Unusable(LLMStatusCode.LLM_LINK_FAILED, text)
        return Prepared(choice.names, context)

    def discard(self, prepared: Prepared) -> None:
        """The handshake failed."""
        if isinstance(prepared.context, Peer):
            prepared.context.close()

    # ---- links -----------------------------------------------------------------------------------------------

    def on_up(self, link: Link) -> None:
        """The link is up; the first thing the peer gets is our table."""
        state = self._state
        with state.lock:
            state.by_token[link.token] = link
            records = state.registry.records() if state.accessible else []
        self._catalog.announce_all(link, records)
        state.on_link_change(link.cluster_id)

    def on_down(self, link: Link, reason: str) -> None:
        """The link is gone: its leases end, its transfers fail."""
        state = self._state
        peer = peer_of(link)
        with state.lock:
            if state.by_token.get(link.token) is link:
                del state.by_token[link.token]
            for lease in state.leases.of_holder(link.token):
                state.leases.end(lease)
            peer.routes.clear()
            state.tables_nbytes -= peer.table.nbytes
            state.sources_nbytes -= peer.sources.nbytes
            if state.is_read_registered(link) and not peer.unlinked:
                state.reader_lost_at = time.monotonic()
            state.condition.notify_all()
        self._endings.link_down(link)
        error = LinkFailedError(f"{describe(link)}: the link went down: {reason}; call link_clusters again")
        error.__cause__ = link.down_cause
        state.flights.cut(lambda f: f.uses(link), error)
        peer.close()
        self._receiver.link_down(link)
        state.on_link_change(link.cluster_id)

    def on_data_socket(self, sock: DataSocket, hello: DataHello, leftover: bytes) -> None:
        """A data connection came in."""
        self._transports.stream.adopt(sock, hello.link_token, hello.dialler_reads, leftover)

    def refuse_data_socket(self, sock: DataSocket, hello: DataHello, reason: str) -> None:
        """There is no descriptor for a data connection: its reader is told."""
        if hello.dialler_reads:
            self._transports.stream.refuse(sock, hello.link_token, reason)

    # ---- messages ----------------------------------------------------------------------------------------------

    def on_message(self, link: Link, frame: Frame) -> None:
        """A request, an announcement, or an answer that came too late."""
        message = frame.message
        match message:
            case Resolve():
                self._responder.resolve(link, message)
            case Release():
                self._responder.release(link, message)
            case Finish():
                self._endings.finish(link, message)
            case Decided():
                self._endings.decided(link, message)
            case Lookup():
                self._responder.lookup(link, message)
            case Publish():
                self._receiver.published(link, frame, message)
            case Offer():
                self._receiver.offer(link, frame, message)
            case PartReady():
                self._receiver.part_ready(link, message)
            case EndOffer():
                self._receiver.end(link, message)
            case _:
                self._on_other(link, frame)

    def _on_other(self, link: Link, frame: Frame) -> None:
        message = frame.message
        match message:
            case Announce():
                self._announced(link, frame, message)
            case Withdraw():
                with self._state.lock:
                    self._state.note_withdrawn(peer_of(link), message.cache_ids)
            case NeedConnections():
                self._connect(link, message)
            case Unlink() | Settle():
                self._when_idle(link, message)
            case Grant():
                give_back(link, message)
            case Found() | Done() | Pong():
                pass  # its caller has gone
            case _:
                raise ProtocolError(f"{type(message).__name__} on an established link")

    def _when_idle(self, link: Link, message: Unlink | Settle) -> None:
        """What waits for the end of transfers is answered by a thread for all of them, if it cannot be now."""
        if isinstance(message, Settle):
            self._asked.put(self._draining.settle_asked(link, message))
        elif (question := self._linking.unlink_asked(link, message)) is not None:
            self._asked.put(question)

    def _announced(self, link: Link, frame: Frame, message: Announce) -> None:
        if not self._state.accessible:
            raise ProtocolError("a cache table was announced to a cluster in managed mode")
        by_address, addresses = peer_of(link).by_address, codec.attachment(frame, 0)
        cache = codec.remote_cache(message.entry, addresses, by_address=by_address)
        with self._state.lock:
            self._state.note_announced(peer_of(link), cache, more_keys=message.more_keys)

    def _connect(self, link: Link, message: NeedConnections) -> None:
        serving = peer_of(link).serving
        if serving is None:
            raise ProtocolError(
                f"{message.count} connections asked for on a link that peers read by {link.peer_reads_by}"
            )
        serving.dial_for_peer(message.count)
