"""The serving thread: answers all peers that read from us over TCP, in fair turns.

Strategy: one epoll loop. An idle connection waits for input, a busy one for room in its socket; each event
is one turn of at most one chunk, so a fast reader cannot starve a slow one. Nothing to do: asleep.
Threads: other threads only post commands, through a queue and an eventfd. A daemon, started on first use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from llm_datadist._core import limits
from llm_datadist._core.line_counts import LineCounts
from llm_datadist._logs import get_logger
from llm_datadist._shortages import failure_of, named, start_thread
from llm_datadist.status import LLMException, OutOfMemoryError
from llm_datadist.transports._sockets import SEND_NOW, Buffer, receive_now
from llm_datadist.transports.seam import Fault, ReadSource, Serving
from llm_datadist.transports.tcp_frames import FIRST_REQUEST, EndKind, FrameError, encode_end
from llm_datadist.transports.tcp_opening import Opener
from llm_datadist.transports.tcp_room import Room
from llm_datadist.transports.tcp_serving import ServedConnection, ServedLink

logger = get_logger("llm_datadist.tcp")

_RECEIVE_NBYTES = 256 << 10
_JOIN_S = 1.0  # the thread never blocks, so this is only reached when it is stopped from outside
_GONE = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class TcpServer:
    """Serves connections until closed."""

    def __init__(self, source: ReadSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._connections: dict[int, ServedConnection] = {}
        self._room = Room()
        self._opener = Opener()
        self._later: set[int] = set()  # descriptors that had no turn, because others of their link had theirs
        self._lines = LineCounts()
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        self._stopping = False

    def serve(self, sock: socket.socket, link: ServedLink, leftover: bytes = b"") -> None:
        """Takes over a connection on which the peer of ``link`` reads; where it cannot be served, the peer is told."""
        try:
            taken = self._post(lambda: self._add(sock, link, leftover))
        except OutOfMemoryError as exc:
            _refuse(sock, link, exc)
            return
        if not taken:
            sock.close()

    def drop(self, link: ServedLink) -> None:
        """Cuts off all connections of a link, also in mid-answer."""
        with self._lock:
            if self._thread is not None:
                self._command(lambda: self._drop(link))

    def close(self) -> None:
        """Ends the thread and all connections. Idempotent."""
        with self._lock:
            self._stopping = True
            thread = self._thread
            if thread is not None and self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors, and does nothing else to them."""
        for connection in list(self._connections.values()):
            close_copy(connection.sock)
        if self._epoll is not None:
            self._epoll.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._stopping = True

    # ---- any thread ----------------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> bool:
        """Has the thread run ``command``; False when it has ended.

        Raises:
            OutOfMemoryError: There is no thread yet, and none can be started now.
        """
        with self._lock:
            if self._stopping:
                return False
            if self._thread is None:
                with named("the thread that serves reads over tcp cannot be started"):
                    self._start()
            self._command(command)
            return True

    def _command(self, command: Callable[[], None]) -> None:
        """Under the lock."""
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def _start(self) -> None:
        with contextlib.ExitStack() as undo:
            epoll = select.epoll()
            undo.callback(epoll.close)
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, wake_fd)
            epoll.register(wake_fd, select.EPOLLIN)
            # The buffer goes with the thread: a finalized engine is garbage for a while.
            run = functools.partial(self._run, epoll, Buffer(_RECEIVE_NBYTES))
            self._thread = start_thread(run, "llm-datadist-tcp")  # it sleeps until the first command
            self._epoll, self._wake_fd = epoll, wake_fd
            undo.pop_all()

    # ---- the serving thread --------------------------------------------------------------------------

    def _run(self, epoll: select.epoll, scratch: Buffer) -> None:
        try:
            while not self._stopping:
                if not self._room.waiting:
                    self._round(epoll, scratch, epoll.poll())
                else:
                    self._round(epoll, scratch, epoll.poll(self._room.look_again_s()))
                    self._let_in(epoll)
        except Exception:
            logger.exception(
                "the thread that serves reads over tcp has failed; the next connection starts another"
            )
        finally:
            self._shut(epoll)

    def _round(self, epoll: select.epoll, scratch: Buffer, events: list[tuple[int, int]]) -> None:
        posted = False
        if len(events) > limits.TURN_CONNECTIONS:
            events = self._in_turns(events)
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is not None:
                self._step(epoll, scratch, connection, event)
            elif fd == self._wake_fd:
                posted = True
        if posted:  # last: a command may close a connection and add one with the same descriptor
            os.eventfd_read(self._wake_fd)
            self._run_commands()

    def _in_turns(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Without the connections of links that have many; those that waited in the last round are first now."""
        events.sort(key=lambda event: event[0] not in self._later)
        self._later.clear()
        turns: Counter[ServedLink | None] = Counter()
        now = []
        for fd, event in events:
            connection = self._connections.get(fd)
            link = connection.link if connection is not None else None
            turns[link] += 1
            if link is not None and turns[link] > limits.TURN_CONNECTIONS:
                self._later.add(fd)
            else:
                now.append((fd, event))
        return now

    def _let_in(self, epoll: select.epoll) -> None:
        """Those that waited with a long selector; others give up their room for them, if they only keep it."""
        for connection in self._room.stalled():
            self._close(connection)  # type: ignore[arg-type]
        for connection in self._room.admitted():
            self._rearm(epoll, connection)  # type: ignore[arg-type]

    def _shut(self, epoll: select.epoll) -> None:
        with self._lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            self._thread = self._epoll = None
            connections, self._connections = self._connections, {}
            self._room = Room()
            self._later.clear()
        self._run_commands()  # sockets that were handed over too late are in there
        for connection in connections.values():
            connection.close()
        epoll.close()
        os.close(wake_fd)

    def _run_commands(self) -> None:
        while self._commands:
            try:
                self._commands.popleft()()
            except Exception:  # the thread serves all others
                logger.exception("a data connection could not be taken over or dropped")

    def _add(self, sock: socket.socket, link: ServedLink, leftover: bytes) -> None:
        epoll = self._epoll
        served = sum(1 for c in self._connections.values() if c.link is link)
        if self._stopping or epoll is None or served >= limits.CONNECTIONS:
            sock.close()
            return
        try:
            connection = ServedConnection(sock, link, self._source)
            epoll.register(connection.fd, select.EPOLLIN | select.EPOLLRDHUP)
        except (OSError, MemoryError) as exc:
            _refuse(sock, link, failure_of("a data connection cannot be served", exc))
            return
        self._connections[connection.fd] = connection
        if leftover:
            try:
                connection.feed(memoryview(leftover))
                self._rearm(epoll, connection)
            except Exception as exc:
                self._fail(connection, exc)

    def _drop(self, link: ServedLink) -> None:
        for connection in [c for c in self._connections.values() if c.link is link]:
            self._close(connection)
        self._room.forget(link.token)

    def _close(self, connection: ServedConnection) -> None:
        del self._connections[connection.fd]
        self._room.give_back(connection)
        connection.close()  # closing takes it out of the epoll set

    def _step(self, epoll: select.epoll, scratch: Buffer, connection: ServedConnection, events: int) -> None:
        """One turn of one connection; whatever it raises ends this connection and no other."""
        if events & _GONE:  # readers never half-close: nobody is left to answer
            self._close(connection)
            return
        was_busy = connection.busy
        try:
            if was_busy:
                connection.turn()
            else:
                count = receive_now(connection.fd, scratch)
                if count > 0:
                    self._feed(connection, scratch.view[:count])
                elif count == 0:
                    self._close(connection)
                    return
            if connection.aside is not None or (
                not connection.busy and self._must_wait(connection, was_busy)
            ):
                epoll.modify(connection.fd, select.EPOLLRDHUP)
            elif connection.busy is not connection.wants_write:
                self._rearm(epoll, connection)
        except Exception as exc:
            self._fail(connection, exc)

    def _must_wait(self, connection: ServedConnection, was_busy: bool) -> bool:
        """Whether there is no room for the selector that it has begun; gives up that of one that is answered."""
        claimed = connection.claimed
        if self._room.holds(connection) and (was_busy or not claimed):
            self._room.give_back(connection)
        return claimed > limits.LONG_SELECTOR_NBYTES and not self._room.admits(connection)

    def _feed(self, connection: ServedConnection, data: memoryview) -> None:
        """Of a long selector each piece costs time, which counts; so does opening it, elsewhere."""
        began = time.monotonic()
        connection.feed(data)
        if self._room.holds(connection):
            self._room.spend(connection, time.monotonic() - began)
        if connection.aside is not None:
            self._opener.submit(lambda: self._open(connection))

    def _open(self, connection: ServedConnection) -> None:
        """On the opener's thread."""
        began = time.monotonic()
        opened = connection.open_aside()
        seconds = time.monotonic() - began
        with self._lock:
            lives = self._thread is not None
            if lives:
                self._command(lambda: self._opened(connection, opened, seconds))
        if not lives:
            _give_back(opened)

    def _opened(self, connection: ServedConnection, opened: Serving | Fault, seconds: float) -> None:
        epoll = self._epoll
        if self._connections.get(connection.fd) is not connection or epoll is None:
            _give_back(opened)
            return
        self._room.spend(connection, seconds)
        connection.begin_aside(opened)
        self._rearm(epoll, connection)

    def _rearm(self, epoll: select.epoll, connection: ServedConnection) -> None:
        connection.wants_write = connection.busy
        interest = select.EPOLLOUT if connection.busy else select.EPOLLIN
        epoll.modify(connection.fd, interest | select.EPOLLRDHUP)

    def _fail(self, connection: ServedConnection, exc: Exception) -> None:
        if isinstance(exc, FrameError):
            self._say_broken(connection, exc)
        elif not isinstance(exc, OSError):  # that one: the reader has gone, or has cut the answer short
            logger.error("serving a read failed: %r", exc, exc_info=logger.isEnabledFor(logging.DEBUG))
        self._close(connection)

    def _say_broken(self, connection: ServedConnection, exc: FrameError) -> None:
        now, host = time.monotonic(), _host_of(connection.sock)
        for left in self._lines.ended(now):
            logger.warning(
                "%d more data connections of %s were closed; the last: %s", left.more, left.address, left.last
            )
        if self._lines.admit(host, "lines", limits.LINES, str(exc), now):
            logger.warning("a data connection of %s is closed: it sent %s", host, exc)


def _give_back(opened: Serving | Fault) -> None:
    if not isinstance(opened, Fault):
        opened.close()


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "a peer that has gone"


def refuse_first(sock: socket.socket, error: LLMException) -> None:
    """Answers the first request of a connection that cannot be served, whatever it asks for."""
    answer = encode_end(FIRST_REQUEST, EndKind.REFUSED, int(error.status_code), str(error))
    with contextlib.suppress(OSError):
        sock.send(answer, SEND_NOW)


def _refuse(sock: socket.socket, link: ServedLink, error: LLMException) -> None:
    logger.warning("%s", error)
    with sock:
        if (
            not link.dialled
        ):  # else the answer might lie there until a later request, for which it is not meant
            refuse_first(sock, error)


def close_copy(sock: socket.socket) -> None:
    """Closes a forked child's copy of a socket; the parent's connection is not told."""
    fd = sock.detach()
    if fd >= 0:
        os.close(fd)
