"""One established link to a peer as the engine sees it, and the answers it waits for.

Invariants: ``on_down`` has been called exactly once when ``state`` stays "down"; a Pending ends exactly
once, with a frame or with the reason of the loss; after the link is down nothing more is sent. What callers'
threads do here is one step or may be repeated, and takes no lock, so an interrupt leaves nothing half done.
Threads: every method may be called from any thread, except that ``Pending.wait`` must not be called on
the control thread. Callbacks of a Pending run on the control thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from llm_datadist._link.seam import Address
from llm_datadist._wire.framing import Buffer, Frame, encode
from llm_datadist._wire.messages import Done, Found, Grant, Identity, Message, Release

_ANSWERS = (Done, Grant, Found, Release)  # to a Grant that nobody waits for, the last one
PendingCallback: TypeAlias = Callable[["Pending"], None]
_END = "end"


class LinkLost(Exception):  # noqa: N818 - a fact about the peer, turned into a status code above
    """The link is down; the text is the reason."""


class Carrier(Protocol):
    """The connection under a link. Every method from any thread."""

    def post(self, chunks: Sequence[Buffer], *, owed: bool = False) -> None:
        """Queues bytes without a system call. ``owed``: they answer what the peer has asked."""

    def flush(self) -> None:
        """Writes what the socket takes now; the rest follows by itself."""

    def note_alive(self) -> None:
        """The peer has shown life elsewhere."""

    def charge(self, seconds: float) -> None:
        """What the peer has sent has cost so much, for nothing."""

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` on the control thread."""

    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread."""


class NoAnswer(TimeoutError):  # noqa: N818 - a fact; a plain TimeoutError may be a signal handler's
    """An answer did not come in time."""


class Pending:
    """An answer that is on its way, and whose it is. Made by :meth:`Link.expect` and :meth:`Link.call`.

    It ends once, by what comes first: the answer, a loss, or ``close``. One call into C decides that
    (``dict.setdefault``), so that no interrupt finds it half done: an answer either belongs to whoever waited
    here, or ``answer`` refuses it, and it goes to ``LinkHandler.on_message``. One thread at a time waits.

    Attributes:
        id: Of the message that is answered.
    """

    def __init__(self, link: Link, message_id: int) -> None:
        self.id = message_id
        self._link = link
        self._end: dict[str, Frame | LinkLost] = {}  # at most one entry, which stays
        self._wakes = threading.Lock()  # taken until the end is there
        self._wakes.acquire()
        self._callbacks: deque[PendingCallback] = deque()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._end)

    @property
    def answered(self) -> bool:
        """Whether the answer is there."""
        return isinstance(self._end.get(_END), Frame)

    def wait(self, deadline: float) -> Frame:
        """Waits for the answer.

        Args:
            deadline: Instant of ``time.monotonic()``.

        Returns:
            The answering frame: Pong, Done, Grant or Found.

        Raises:
            LinkLost: The link went down, or it was given up; the text is the reason.
            NoAnswer: The deadline passed. The answer is still expected: ``close`` if not.
            RuntimeError: Called on the control thread, which would wait for itself.
        """
        if not self._end:
            if self._link.on_control_thread():
                raise RuntimeError("Pending.wait on the control thread never ends: use add_done_callback")
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            self._wakes.acquire(timeout=left)
        end = self._end.get(_END)
        if end is None:
            link = self._link
            raise NoAnswer(f"cluster {link.cluster_id} at {link.address} did not answer in time")
        if isinstance(end, LinkLost):
            raise LinkLost(str(end)) from end.__cause__
        return end

    def close(self) -> Frame | None:
        """Nobody waits any more: what comes from now on goes to ``LinkHandler.on_message``. Idempotent.

        Returns:
            The answer, if it had come before: what it carries is the caller's.
        """
        self.fail("nobody waits for this answer any more")
        self._link.forget(self.id)
        end = self._end.get(_END)
        return end if isinstance(end, Frame) else None

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends it without an answer; from any thread, nothing if it has ended."""
        lost = LinkLost(reason)
        lost.__cause__ = cause
        self._finish(lost)

    def give_up(self) -> None:
        """``fail``, for want of time."""
        self.fail(f"no answer of cluster {self._link.cluster_id} in time")
        self._link.forget(self.id)

    def answer(self, frame: Frame) -> bool:
        """Ends it with the answer; False if it has ended: the answer is not taken. For the link alone."""
        return self._finish(frame)

    def add_done_callback(self, fn: PendingCallback) -> None:
        """Calls ``fn(self)`` once, on the control thread, when it has ended."""
        # Stored, then looked at; ``_finish`` does both the other way round, so that one of the two sees the other.
        self._callbacks.append(fn)
        if self._end:
            self._call_back()

    def _finish(self, end: Frame | LinkLost) -> bool:
        won = self._end.setdefault(_END, end) is end
        # Whoever comes second frees it as well: an interrupt may have kept the first from it.
        with contextlib.suppress(RuntimeError):
            self._wakes.release()
        self._call_back()
        return won

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                fn = self._callbacks.popleft()
            except IndexError:  # the other thread that looked has it
                return
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
        down_cause: What the system reported when it went down, if it was that.
        left: This side has said goodbye, or is about to: what is posted from then on does not arrive.
        peer_left: The peer has.
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
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._state = "up"
        self._ends: str | None = None
        self._down_reason: str | None = None
        self.down_cause: BaseException | None = None
        self.left = self.peer_left = False

    def __repr__(self) -> str:
        return f"<Link to cluster {self.cluster_id} at {self.address}, {self._state}>"

    @property
    def state(self) -> str:
        """One of "up", "silent" (heartbeats are missing) and "down" (for good)."""
        return self._state

    @property
    def host(self) -> str:
        """Its address without the port: links there share what is divided among addresses."""
        return self.address.rpartition(":")[0]

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
        if self._ends is not None:
            raise LinkLost(self._ends) from self.down_cause
        self._carrier.post(encode(message, attachments), owed=isinstance(message, _ANSWERS))

    def flush(self) -> None:
        """Writes what the socket takes now; the control thread sends the rest. Never blocks."""
        self._carrier.flush()

    def send(self, message: Message, attachments: Sequence[Buffer] = ()) -> None:
        """``post`` and ``flush``."""
        self.post(message, attachments)
        self.flush()

    def expect(self) -> Pending:
        """The answer to a message that ``ask`` will send: its holder knows of it before it can come."""
        return Pending(self, next(self._ids))

    def ask(self, pending: Pending, message: Message, attachments: Sequence[Buffer] = ()) -> None:
        """Sends the message, of the id ``pending.id``, whose answer that is.

        Raises:
            LinkLost: The link is down.
        """
        # Entered, then the link is looked at; ``set_down`` does both the other way round: one sees the other.
        self._pending[pending.id] = pending
        try:
            self.send(message, attachments)
        except BaseException:
            self.forget(pending.id)
            raise

    def call(self, message: Message, attachments: Sequence[Buffer] = ()) -> Pending:
        """Sends a message that has an ``id`` and returns its answer to come, which obliges to nothing.

        Raises:
            LinkLost: The link is down.
        """
        message_id: int = message.id  # type: ignore[attr-defined]
        pending = Pending(self, message_id)
        self.ask(pending, message, attachments)
        return pending

    def note_alive(self) -> None:
        """The peer has shown life on another connection (data arrived)."""
        self._carrier.note_alive()

    def charge(self, seconds: float) -> None:
        """What the peer has sent has cost another thread so much, for nothing: it counts as its share of ours."""
        self._carrier.charge(seconds)

    # ---- for the control plane ------------------------------------------------------------------------

    def forget(self, message_id: int) -> None:
        """No one waits for this answer any more."""
        self._pending.pop(message_id, None)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` on the control thread."""
        self._carrier.call_soon(fn)

    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread."""
        return self._carrier.on_control_thread()

    def expects(self, message_id: int) -> bool:
        """Whether somebody waits for this answer."""
        return message_id in self._pending

    def answer(self, message_id: int, frame: Frame) -> bool:
        """Gives an answer to its Pending; False if nobody waits for it. Control thread only."""
        pending = self._pending.pop(message_id, None)
        return pending is not None and pending.answer(frame)

    def set_silent(self, silent: bool) -> None:
        """Heartbeats are missing, or are back. Control thread only."""
        if self._down_reason is None:
            self._state = "silent" if silent else "up"

    def leave(self, reason: str) -> None:
        """Before a goodbye of this side: who has posted something looks at ``left`` after it. Control thread only."""
        self.left = True
        if self._ends is None:
            self._ends = reason

    def set_down(self, reason: str, cause: BaseException | None = None) -> bool:
        """Marks it down and fails what waits; False if it was down. Control thread only."""
        if self._down_reason is not None:
            return False
        self.down_cause, self._down_reason, self._state = cause, reason, "down"
        self._ends = reason
        while self._pending:
            with contextlib.suppress(KeyError):  # its waiter has closed it just now
                self._pending.popitem()[1].fail(reason, cause)
        return True
