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
from collections import deque
from collections.abc import Callable

from llm_datadist._logs import get_logger
from llm_datadist._shortages import failure_of, named, start_thread
from llm_datadist.status import LLMException, OutOfMemoryError
from llm_datadist.transports._sockets import SEND_NOW, Buffer, receive_now
from llm_datadist.transports.seam import ReadSource
from llm_datadist.transports.tcp_frames import FIRST_REQUEST, EndKind, FrameError, encode_end
from llm_datadist.transports.tcp_serving import ServedConnection, ServedLink

logger = get_logger("llm_datadist.tcp")

MAX_CONNECTIONS = 64  # served per link: far above what a reader opens, low enough to spare descriptors
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
            self._thread = start_thread(run, "llm_datadist-tcp")  # it sleeps until the first command
            self._epoll, self._wake_fd = epoll, wake_fd
            undo.pop_all()

    # ---- the serving thread --------------------------------------------------------------------------

    def _run(self, epoll: select.epoll, scratch: Buffer) -> None:
        try:
            while not self._stopping:
                self._round(epoll, scratch, epoll.poll())
        except Exception:
            logger.exception(
                "the thread that serves reads over tcp has failed; the next connection starts another"
            )
        finally:
            self._shut(epoll)

    def _round(self, epoll: select.epoll, scratch: Buffer, events: list[tuple[int, int]]) -> None:
        posted = False
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is not None:
                self._step(epoll, scratch, connection, event)
            elif fd == self._wake_fd:
                posted = True
        if posted:  # last: a command may close a connection and add one with the same descriptor
            os.eventfd_read(self._wake_fd)
            self._run_commands()

    def _shut(self, epoll: select.epoll) -> None:
        with self._lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            self._thread = self._epoll = None
            connections, self._connections = self._connections, {}
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
        if self._stopping or epoll is None or served >= MAX_CONNECTIONS:
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

    def _close(self, connection: ServedConnection) -> None:
        del self._connections[connection.fd]
        connection.close()  # closing takes it out of the epoll set

    def _step(self, epoll: select.epoll, scratch: Buffer, connection: ServedConnection, events: int) -> None:
        """One turn of one connection; whatever it raises ends this connection and no other."""
        if events & _GONE:  # readers never half-close: nobody is left to answer
            self._close(connection)
            return
        try:
            if connection.busy:
                connection.turn()
            else:
                count = receive_now(connection.fd, scratch)
                if count > 0:
                    connection.feed(scratch.view[:count])
                elif count == 0:
                    self._close(connection)
                    return
            if connection.busy is not connection.wants_write:
                self._rearm(epoll, connection)
        except Exception as exc:
            self._fail(connection, exc)

    def _rearm(self, epoll: select.epoll, connection: ServedConnection) -> None:
        connection.wants_write = connection.busy
        interest = select.EPOLLOUT if connection.busy else select.EPOLLIN
        epoll.modify(connection.fd, interest | select.EPOLLRDHUP)

    def _fail(self, connection: ServedConnection, exc: Exception) -> None:
        if isinstance(exc, FrameError):
            logger.warning("a data connection is closed: its peer sent %s", exc)
        elif not isinstance(exc, OSError):  # that one: the reader has gone, or has cut the answer short
            logger.error("serving a read failed: %r", exc, exc_info=logger.isEnabledFor(logging.DEBUG))
        self._close(connection)


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
