"""One established link to a peer as the engine sees it, and the answers it waits for.

Invariants: ``on_down`` has been called exactly once when ``state`` stays "down"; a Pending ends exactly
once, with a frame or with the reason of the loss; after the link is down nothing more is sent.
Threads: every method may be called from any thread, except that ``Pending.wait`` must not be called on
the control thread. Callbacks of a Pending run on the control thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from llm_datadist._link.seam import Address
from llm_datadist._wire.framing import Buffer, Frame, encode
from llm_datadist._wire.messages import Identity, Message

PendingCallback: TypeAlias = Callable[["Pending"], None]


class LinkLost(Exception):  # noqa: N818 - a fact about the peer, turned into a status code above
    """The link is down; the text is the reason."""


class Carrier(Protocol):
    """The connection under a link. Every method from any thread."""

    def post(self, chunks: Sequence[Buffer]) -> None:
        """Queues bytes without a system call."""

    def flush(self) -> None:
        """Writes what the socket takes now; the rest follows by itself."""

    def note_alive(self) -> None:
        """The peer has shown life elsewhere."""

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` on the control thread."""

    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread."""


class Pending:
    """An answer that is on its way. Made by :meth:`Link.call`."""

    def __init__(self, link: Link, message_id: int) -> None:
        self._link = link
        self._id = message_id
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._frame: Frame | None = None
        self._lost: str | None = None
        self._callbacks: list[PendingCallback] = []

    @property
    def done(self) -> bool:
        """Whether the answer or the loss of the link is known."""
        return self._ended.is_set()

    @property
    def answered(self) -> bool:
        """Whether the answer is there."""
        return self._frame is not None

    def wait(self, deadline: float) -> Frame:
        """Waits for the answer.

        Args:
            deadline: Instant of ``time.monotonic()``.

        Returns:
            The answering frame: Pong, Done, Grant or Found.

        Raises:
            LinkLost: The link went down; the text is the reason.
            TimeoutError: The deadline passed. The answer is still expected: ``discard`` if not.
            RuntimeError: Called on the control thread, which would wait for itself.
        """
        if not self._ended.is_set():
            if self._link.on_control_thread():
                raise RuntimeError("Pending.wait on the control thread never ends: use add_done_callback")
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._ended.wait(left):
                link = self._link
                raise TimeoutError(f"cluster {link.cluster_id} at {link.address} did not answer in time")
        if self._frame is not None:
            return self._frame
        raise LinkLost(self._lost)

    def discard(self) -> None:
        """Nobody waits any more: a late answer goes to ``LinkHandler.on_message``. Idempotent."""
        self._link.forget(self._id)

    def give_up(self) -> None:
        """``discard``, and end unanswered for whoever waits. Idempotent."""
        self.discard()
        self.finish(None, f"no answer of cluster {self._link.cluster_id} in time")

    def add_done_callback(self, fn: PendingCallback) -> None:
        """Calls ``fn(self)`` once, on the control thread, when the answer or the loss is there."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(fn)
                return
        self._link.call_soon(lambda: fn(self))

    def finish(self, frame: Frame | None, lost: str | None) -> None:
        """Ends the wait; for the link alone, on the control thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._frame, self._lost = frame, lost
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            self._link.call_soon(lambda fn=fn: fn(self))  # type: ignore[misc]


class Link:
    """An established link.

    Attributes:
        cluster_id: The peer's cluster id.
        address: Text of the peer's address, for people.
        dialled_address: What this side connected to, numeric; None on the side that was dialled.
        identity: What the peer said about itself.
        token: Secret of this link, shared by both ends.
        dialled: Whether this side has asked for this link (it may have been made by the peer's dial).
        is_self: Both ends are in this process.
        accepted: This side was dialled. The accepted end of a link to myself is in no table.
        peer_reads_by: The transports with which the peer reads us.
        reads_by: The transports with which we read the peer.
        context: The engine's own (``Prepared.context``).
        since: ``time.time()`` at which it came up.
    """

    def __init__(
        self,
        carrier: Carrier,
        identity: Identity,
        token: bytes,
        *,
        address: str,
        dialled_address: Address | None,
        is_self: bool,
        reads_by: tuple[str, ...],
        peer_reads_by: tuple[str, ...],
        context: object,
        since: float,
    ) -> None:
        self._carrier = carrier
        self.identity = identity
        self.cluster_id = identity.cluster_id
        self.token = token
        self.address = address
        self.dialled_address = dialled_address
        self.accepted = dialled_address is None
        self.dialled = dialled_address is not None
        self.is_self = is_self
        self.reads_by = reads_by
        self.peer_reads_by = peer_reads_by
        self.context = context
        self.since = since
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._state = "up"
        self._down_reason: str | None = None

    def __repr__(self) -> str:
        return f"<Link to cluster {self.cluster_id} at {self.address}, {self._state}>"

    @property
    def state(self) -> str:
        """One of "up", "silent" (heartbeats are missing) and "down" (for good)."""
        return self._state

    @property
    def down_reason(self) -> str | None:
        """Why it is down; None while it is not."""
        return self._down_reason

    # ---- sending -----------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A fresh id for a message of ours that has one."""
        return next(self._ids)

    def post(self, message: Message, attachments: Sequence[Buffer] = ()) -> None:
        """Queues a message without a system call; ``flush`` (or the next turn of the loop) sends it.

        Raises:
            LinkLost: The link is down.
            OversizeError: The message is larger than a frame may be.
        """
        if self._down_reason is not None:
            raise LinkLost(self._down_reason)
        self._carrier.post(encode(message, attachments))

    def flush(self) -> None:
        """Writes what the socket takes now; the control thread sends the rest. Never blocks."""
        self._carrier.flush()

    def send(self, message: Message, attachments: Sequence[Buffer] = ()) -> None:
        """``post`` and ``flush``."""
        self.post(message, attachments)
        self.flush()

    def call(self, message: Message, attachments: Sequence[Buffer] = ()) -> Pending:
        """Sends a message that has an ``id`` and returns its answer to come.

        Raises:
            LinkLost: The link is down.
        """
        message_id: int = message.id  # type: ignore[attr-defined]
        pending = Pending(self, message_id)
        with self._lock:
            if self._down_reason is not None:
                raise LinkLost(self._down_reason)
            self._pending[message_id] = pending
        try:
            self.send(message, attachments)
        except BaseException:
            self.forget(message_id)
            raise
        return pending

    def note_alive(self) -> None:
        """The peer has shown life on another connection (data arrived)."""
        self._carrier.note_alive()

    # ---- for the control plane ------------------------------------------------------------------------

    def forget(self, message_id: int) -> None:
        """No one waits for this answer any more."""
        with self._lock:
            self._pending.pop(message_id, None)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` on the control thread."""
        self._carrier.call_soon(fn)

    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread."""
        return self._carrier.on_control_thread()

    def answer(self, message_id: int, frame: Frame) -> bool:
        """Gives an answer to its Pending; False if nobody waits for it. Control thread only."""
        with self._lock:
            pending = self._pending.pop(message_id, None)
        if pending is None:
            return False
        pending.finish(frame, None)
        return True

    def set_silent(self, silent: bool) -> None:
        """Heartbeats are missing, or are back. Control thread only."""
        with self._lock:
            if self._down_reason is None:
                self._state = "silent" if silent else "up"

    def set_down(self, reason: str) -> bool:
        """Marks it down and fails what waits; False if it was down. Control thread only."""
        with self._lock:
            if self._down_reason is not None:
                return False
            self._down_reason, self._state = reason, "down"
            lost, self._pending = list(self._pending.values()), {}
        for pending in lost:
            pending.finish(None, reason)
        return True
