"""A Link without a connection: what it sends is kept, the control thread is whoever calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from llm_datadist._link.link import Link
from llm_datadist._wire.framing import Buffer, Decoder, Frame
from llm_datadist._wire.messages import AnyMessage


class Carrier:
    """Implements ``link.Carrier``. ``turns``: what is to run on the control thread."""

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []
        self.turns: deque[Callable[[], None]] = deque()
        self.is_control = False

    def post(self, chunks: Sequence[Buffer], **more: Any) -> None:
        decoder = Decoder()
        for chunk in chunks:
            decoder.push(bytes(chunk))
        frame = decoder.take()
        assert frame is not None
        self.sent.append(frame.message)

    def flush(self) -> None:
        pass

    def note_alive(self) -> None:
        pass

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.turns.append(fn)

    def on_control_thread(self) -> bool:
        return self.is_control

    def turn(self) -> None:
        while self.turns:
            self.turns.popleft()()


def link_alone(cluster_id: int = 7, context: object = None) -> tuple[Link, Carrier]:
    """A link that is up, and what is under it."""
    carrier, identity = Carrier(), SimpleNamespace(cluster_id=cluster_id, instance=b"")
    link = Link(
        carrier,
        identity,  # type: ignore[arg-type]
        b"token",
        address="10.0.0.1:1",
        dialled_address=None,
        is_self=False,
        reads_by=(),
        peer_reads_by=(),
        context=context,
        since=0.0,
    )
    return link, carrier


def frame(message: AnyMessage) -> Frame:
    return Frame(message, ())
