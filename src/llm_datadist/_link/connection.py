"""One control connection: a socket, its session, and the bytes that wait to be sent.

Invariants: frames leave whole and in the order in which they were posted, whoever posts; ``on_closed`` of
the owner is called exactly once, unless the socket was handed over; a peer that does not read its answers is
asked to wait (``inbox``), and one that floods us has its share of the control thread, a turn at a time. The socket is
closed under the lock under which it is written, so that no other thread writes to a descriptor that has
become someone else's.
Threads: ``post``, ``flush``, ``note_alive``, ``charge``, ``call_soon``, ``on_control_thread`` from any; the rest on the
control thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from llm_datadist._core import limits
from llm_datadist._link.inbox import Inbox
from llm_datadist._link.link import Link
from llm_datadist._link.loop import ControlLoop, TimerHandle
from llm_datadist._link.outbox import Outbox
from llm_datadist._link.seam import Address, ConnectionOwner, SocketCalls
from llm_datadist._shortages import is_of_system
from llm_datadist._waiting import guard
from llm_datadist._wire.framing import Buffer, ProtocolError
from llm_datadist._wire.proofs import Ends, end_of
from llm_datadist._wire.session import Closed, ConfirmIn, Event, HelloIn, Session, State, WelcomeIn

RECV_NBYTES = 64 << 10
MESSAGES_AT_ONCE = 4  # between two looks at the clock

_ASKS_US = (HelloIn, WelcomeIn, ConfirmIn)  # events that need a decision of ours


def ends_of(sock: socket.socket) -> Ends:
    """Of a connection.

    Raises:
        OSError: It has gone.
    """
    return Ends(end_of(sock.getsockname()), end_of(sock.getpeername()))


class Connection:
    """The carrier of a link, from the first byte of the handshake on.

    Attributes:
        number: Its name in the table.
        session: The protocol.
        outbox: What waits to be sent.
        inbox: What has come.
        link: Once it is up.
        ends: Of the TCP connection, as seen from here.
        peer_address: Text, for people.
        dialled_address: What was dialled, numeric; None if we were.
        ticket: Of the dial it was made for; None if we were dialled.
    """

    def __init__(
        self,
        number: int,
        loop: ControlLoop,
        sock: socket.socket,
        calls: SocketCalls,
        session: Session,
        owner: ConnectionOwner,
        mark_dirty: Callable[[Connection], None],
        *,
        ends: Ends,
        peer_address: str,
        dialled_address: Address | None = None,
        ticket: int | None = None,
    ) -> None:
        self.number = number
        self.session = session
        self.link: Link | None = None
        self.ends = ends
        self.peer_address = peer_address
        self.dialled_address = dialled_address
        self.ticket = ticket
        self._loop = loop
        self._sock = sock
        self._calls = calls
        self._owner = owner
        self._mark_dirty = mark_dirty
        self._lock = guard(self)
        self.outbox = Outbox(lambda: owner.waiting_nbytes(lambda conn: conn.outbox.about))
        self.inbox = Inbox(
            session, self.outbox, lambda number: self.link is None or self.link.expects(number)
        )
        self._pace = owner.hosts.join(ends.peers)
        self._rests = False  # until its share of the control thread allows for more
        self._interest = 0
        self._closed = self._failing = self._wants_write = self._corked = self._dirty = False
        self._alive_at = 0.0
        self._timer: TimerHandle | None = None
        self._timer_at = float("inf")

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._closed

    def open(self) -> None:
        """Begins to listen to the peer, and says what the session says first."""
        self._watch()
        self._pump()

    # ---- any thread --------------------------------------------------------------------------------

    def post(self, chunks: Sequence[Buffer], *, owed: bool = False) -> None:
        """See ``link.Carrier``."""
        nbytes = sum(map(len, chunks))
        with self._lock:
            if self._closed or self._failing:
                return
            overflow = not self.outbox.has_room(nbytes)
            if overflow:
                self._failing = True
            else:
                self.outbox.put(chunks, owed=owed)
                if not self._dirty:  # announced first: an interrupt in between announces it twice
                    self._mark_dirty(self)
                    self._dirty = True
        if overflow:
            waiting = self.outbox.about >> 20
            self._loop.call_soon(lambda: self.close(f"the peer does not read: {waiting} MiB wait for it"))

    def flush(self) -> None:
        """See ``link.Carrier``."""
        failure: OSError | None = None
        with self._lock:
            if self._closed or self._failing or self._corked:
                return
            try:
                drained = self._write()
            except OSError as error:
                if not is_of_system(error):
                    raise
                failure, drained, self._failing = error, True, True
            ask = not drained and not self._wants_write
        if failure is not None:
            self._loop.call_soon(lambda: self._after_write_failure(failure))
        elif ask:
            self._loop.call_soon(self._ask_to_write)

    def flush_posted(self) -> None:
        """``flush`` for what ``mark_dirty`` announced; it will be announced anew."""
        with self._lock:
            self._dirty = False
        self.flush()

    def note_alive(self) -> None:
        """See ``link.Carrier``."""
        self._alive_at = time.monotonic()

    def charge(self, seconds: float) -> None:
        """See ``link.Carrier``."""
        self._pace.spend(seconds)

    def call_soon(self, fn: Callable[[], None]) -> None:
        """See ``link.Carrier``."""
        self._loop.call_soon(fn)

    def on_control_thread(self) -> bool:
        """See ``link.Carrier``."""
        return self._loop.on_thread()

    def _write(self) -> bool:
        """Under the lock: True when nothing is left."""
        budget = limits.TURN_OUT_NBYTES
        self.outbox.forget_sent()  # by who was interrupted then
        while self.outbox and budget > 0:
            try:
                self._send_some()
            except (BlockingIOError, InterruptedError):
                return False
            sent = self.outbox.forget_sent()
            if not sent:
                return False
            budget -= sent
        return not self.outbox

    def _send_some(self) -> None:
        outbox = self.outbox
        if outbox.nbytes <= self._calls.nbytes:
            self._calls.send(self._sock.fileno(), outbox)
        else:
            outbox.send(self._sock.sendmsg, outbox.first(), (), socket.MSG_NOSIGNAL)

    # ---- control thread ----------------------------------------------------------------------------

    def _on_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._on_writable()
        if events & selectors.EVENT_READ and not self._closed:
            self._read()

    def _ask_to_write(self) -> None:
        self._wants_write = True
        self._watch()

    def _on_writable(self) -> None:
        owed, waiting = self.outbox.owes, self.outbox.about
        self._wants_write = False
        self.flush()
        if owed and self.outbox.about < waiting:
            self.note_alive()  # it reads its answers; its heartbeats wait behind its questions
        if self.inbox.more:
            self._read()
        self._watch()

    def _watch(self) -> None:
        if self._closed:
            return
        write = self._wants_write or (self.inbox.holds and not self._rests)  # whoever makes room for it
        read = 0 if self._rests or self.inbox.is_full or self.inbox.more else selectors.EVENT_READ
        interest = read | (selectors.EVENT_WRITE if write else 0)
        if interest == self._interest:
            return
        self._interest = interest
        if interest:
            self._loop.register(self._sock, interest, self._on_ready)
        else:
            self._loop.unregister(self._sock)

    def _read(self) -> None:
        """One turn: first what came before and had to wait, then what is in the socket."""
        if self._closed or self._rests or self.inbox.is_full:
            return
        self._rests = not self._pace.admits(self._go_on)
        if not self._rests:
            began, heard = time.monotonic(), self.session.heard
            used_up = self._read_turn(began + limits.TURN_S) or self.inbox.more
            asked = self.session.heard != heard
            self._rest(self._pace.took(time.monotonic() - began, asked=asked, used_up=used_up))
        self._watch()

    def _read_turn(self, until: float) -> bool:
        """True: there may be more."""
        inbox, nbytes, stop = self.inbox, limits.TURN_NBYTES, self.inbox.taken + limits.TURN_MESSAGES
        while not self._closed and not inbox.is_full:
            data = b"" if inbox.more else self._receive()
            if data is None:
                return False
            nbytes -= len(data)
            few = min(MESSAGES_AT_ONCE, stop - inbox.taken)
            self._handle(inbox.receive(data, time.monotonic(), few))
            self._check_inbox()
            if nbytes <= 0 or inbox.taken >= stop or time.monotonic() > until:
                return not self._closed
            if data and len(data) < self._calls.nbytes and not inbox.more:
                return False  # that was all; the end of the stream, if it is there, wakes us again
        return False

    def _check_inbox(self) -> None:
        """What waits here, such as a message that does not come to its end, takes no room from all others."""
        if not self._closed and self.inbox.waiting_nbytes > limits.INBOX_SURE_NBYTES:
            waiting = self._owner.waiting_nbytes(lambda conn: conn.inbox.waiting_nbytes)
            if waiting > limits.INBOXES_NBYTES:
                self.close(f"{waiting >> 20} MiB of messages wait on all links", error=True)

    def _receive(self) -> bytes | None:
        try:
            data = self._calls.receive(self._sock.fileno())
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self.close(f"the connection failed: {error.strerror or error}", cause=error)
            return None
        if data is not None and not data:
            self.close("the peer closed the connection")
            return None
        return data

    def _rest(self, rest_s: float) -> None:
        """The next turn: when others had theirs, or when its share allows for it."""
        if rest_s > 0 and not self._closed:
            self._rests = True
            self._loop.call_at(time.monotonic() + rest_s, self._go_on)
        elif self.inbox.more:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._rests = False
        if not self._closed:
            self._read()

    def _handle(self, events: Iterable[Event]) -> None:
        try:
            for event in events:
                if self._closed:
                    return
                if isinstance(event, Closed):
                    self.close(event.reason, error=event.error)
                elif not (isinstance(event, _ASKS_US) and self.session.state is State.CLOSED):
                    self._owner.on_event(self, event)
        except ProtocolError as error:
            self.close(str(error), error=True)
        except Exception:
            self._owner.on_bug(self)
            self.close("an internal error of this side")
        self._pump()

    def _pump(self) -> None:
        """Sends what the session has to say and keeps its timer set."""
        if self._closed:
            return
        out = self.session.outgoing()
        if out:
            self.post(out, owed=self.link is not None)
            self.flush()
        due = self.session.get_timer()
        if due is not None and due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        if self._closed:
            return
        events = self.session.note_alive(self._alive_at) if self._alive_at > self.session.last_alive else []
        self._handle(events + self.session.on_timer(self._loop.polled_at))

    def _after_write_failure(self, error: OSError | None) -> None:
        self._read()  # its last words, a Bye or a Refused, may lie there
        self.close(f"the connection failed: {error}", cause=error)

    def say(self) -> None:
        """Sends what a decision made the session say."""
        self._pump()

    def cork(self) -> None:
        """Queues what the session says and holds everything back until ``uncork``."""
        self._corked = True
        self.post(self.session.outgoing())

    def uncork(self) -> None:
        """Sends what was held back."""
        self._corked = False
        self._pump()
        self.flush()

    def peer_has_closed(self) -> bool:
        """Whether the end of the stream is the next thing to be read."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def detach(self) -> socket.socket:
        """Gives the socket away; nothing is reported any more."""
        self._end()
        return self._sock

    def close(self, reason: str, *, error: bool = False, cause: BaseException | None = None) -> None:
        """Ends the connection; what the session still says is sent as far as the socket takes it."""
        if self._closed:
            return
        self._last_words()
        self._end()
        self._sock.close()
        self._owner.on_closed(self, reason, error=error, cause=cause)

    def _last_words(self) -> None:
        out = self.session.outgoing()
        if not out or self._failing:
            return
        self._corked = False
        with contextlib.suppress(OSError):
            for _ in range(limits.LAST_READS):  # closing with unread bytes would send a reset instead
                if not self._sock.recv(RECV_NBYTES):
                    break
        self.post(out)
        self.flush()

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            self.outbox.clear()
            self.inbox.clear()
            self._loop.unregister(self._sock)
        self._pace.leave()
        if self._timer is not None:
            self._timer.cancel()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptor, takes no lock."""
        if not self._closed:
            self._closed = True
            self._sock.close()
