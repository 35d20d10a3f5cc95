"""LinkServices with a handler that only takes notes, for tests of the control plane."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from llm_datadist._engine.control_calls import ControlCalls
from llm_datadist._link.link import Link
from llm_datadist._link.seam import Address, Prepared, Showing, SocketCalls, Target, Unusable
from llm_datadist._link.service import LinkService, LinkSettings
from llm_datadist._wire.framing import Frame
from llm_datadist._wire.messages import DataHello, Done, Identity, Unlink
from llm_datadist.testing.stopwatch import Stopwatch


class Notes:
    """A LinkHandler. Answers Unlink with Done, so that calls have an answer."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ups: list[Link] = []
        self.downs: list[tuple[Link, str]] = []
        self.frames: list[tuple[Link, Frame]] = []
        self.data: list[tuple[socket.socket, DataHello, bytes]] = []
        self.prepared = 0
        self.discarded = 0
        self.asks: list[Callable[[int], None]] = []
        self.addresses: list[Address | None] = []
        self.shown: list[bytes] = []
        self.looked_for: list[bytes] = []
        self.refuse: Unusable | None = None
        self.answers = True
        self.first_words: Callable[[Link], None] = lambda link: None

    def show(self, proof: bytes) -> dict[str, bytes]:
        self.shown.append(proof)
        return {"x": b"y"}

    def hide(self, proof: bytes) -> None:
        self.shown.remove(proof)

    def prepare(
        self,
        peer: Identity,
        showing: Showing,
        link_token: bytes,
        address: Address | None,
        ask: Callable[[int], None],
    ) -> Prepared | Unusable:
        self.looked_for.append(showing.proof)
        if self.refuse is not None:
            return self.refuse
        self.prepared += 1
        self.asks.append(ask)
        self.addresses.append(address)
        return Prepared((f"by-{peer.backend}",), link_token)

    def discard(self, prepared: Prepared) -> None:
        self._note(lambda: setattr(self, "discarded", self.discarded + 1))

    def on_up(self, link: Link) -> None:
        self.first_words(link)
        self._note(lambda: self.ups.append(link))

    def on_message(self, link: Link, frame: Frame) -> None:
        self._note(lambda: self.frames.append((link, frame)))
        if self.answers and isinstance(frame.message, Unlink):
            link.send(Done(id=frame.message.id, code=0), frame.attachments)

    def on_down(self, link: Link, reason: str) -> None:
        self._note(lambda: self.downs.append((link, reason)))

    def refuse_data_socket(self, sock: socket.socket, hello: DataHello, reason: str) -> None:
        pass

    def on_data_socket(self, sock: socket.socket, hello: DataHello, leftover: bytes) -> None:
        self._note(lambda: self.data.append((sock, hello, leftover)))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
        """Whether the condition came true in the time that the machine gave; it is looked at after every note."""
        watch = Stopwatch()
        with self.changed:
            came = self.changed.wait_for(condition, timeout_s)
            while not came and watch.within(timeout_s):
                came = self.changed.wait_for(condition, 0.01)
        return came

    def _note(self, fn: Callable[[], object]) -> None:
        with self.changed:
            fn()
            self.changed.notify_all()


class Engine:
    """A started LinkService and its notes."""

    def __init__(
        self,
        cluster_id: int,
        *,
        listen: str | None = "127.0.0.1",
        port: int = 0,
        notes: Notes | None = None,
        accessible: bool = False,
        backend: str = "auto",
        heartbeat_ms: int = 1000,
        link_timeout_ms: int = 30000,
        retry_count: int = 1,
        calls: SocketCalls | None = None,
    ) -> None:
        self.id = cluster_id
        self.notes = notes or Notes()
        settings = LinkSettings(
            cluster_id=cluster_id,
            role=1,
            accessible=accessible,
            backend=backend,
            heartbeat_ms=heartbeat_ms,
            link_timeout_ms=link_timeout_ms,
            retry_count=retry_count,
            listen=None if listen is None else Address(listen, port),
        )
        self.service = LinkService(
            settings, os.urandom(16), self.notes, lambda: os.urandom(16), calls or ControlCalls()
        )
        self.service.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.service.stop("the test is over")

    @property
    def address(self) -> Address:
        found = self.service.listen_address
        if found is None:
            raise ValueError("this engine does not listen")
        return found

    @property
    def target(self) -> Target:
        return Target(self.id, self.address)
