"""The control plane of one engine: listens, dials, keeps links alive and tells the handler.

Strategy: one control thread (``loop``) owns all sockets, sessions and the policy (``driver``, ``table``);
this class is the door to it for all other threads. Thread rule: every method may be called from any
thread, ``dial`` and ``ping`` not from the control thread, for which they would wait. ``drop``,
``add_reader``, ``remove_reader`` and ``stop`` wait for the control thread, which may be inside the
handler: hold no lock that the handler takes.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from llm_datadist._link.driver import LinkDriver
from llm_datadist._link.link import Link
from llm_datadist._link.listener import Place, find_place
from llm_datadist._link.listeners import Held, Listeners
from llm_datadist._link.loop import ControlLoop, TimerHandle
from llm_datadist._link.seam import Address, LinkHandler, SocketCalls, Target
from llm_datadist._shortages import failure_of, named
from llm_datadist._waiting import Latch
from llm_datadist._wire.messages import Identity, Ping
from llm_datadist.status import EngineFinalizedError, LLMException, LLMStatusCode

T = TypeVar("T")

STOP_S = 1.0  # for the control thread to end; it needs milliseconds unless a handler holds it up
GRACE_S = 0.25  # after its deadline, in which a dial's result may still come from a busy control thread


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What the options say about links.

    Attributes:
        listen: Where to listen; None: no listener.
        advertise_ip: Host that peers are told with the listener's port; "" or None: none.
    """

    cluster_id: int
    role: int
    accessible: bool
    backend: str = "auto"
    heartbeat_ms: int = 1000
    link_timeout_ms: int = 30000
    retry_count: int = 1
    listen: Address | None = None
    advertise_ip: str | None = None


class LinkService:
    """All links of one engine. Made stopped; ``start``, then use, then ``stop``; not to be started again.

    Args:
        settings: What the options say.
        instance: 16 random bytes of this engine's life.
        handler: The engine.
        random_token: Gives 16 to 64 random bytes.
        calls: How connections send and receive.
    """

    def __init__(
        self,
        settings: LinkSettings,
        instance: bytes,
        handler: LinkHandler,
        random_token: Callable[[], bytes],
        calls: SocketCalls,
    ) -> None:
        self._settings = settings
        self._role = settings.role
        identity = Identity(
            cluster_id=settings.cluster_id,
            instance=instance,
            role=settings.role,
            accessible=settings.accessible,
            backend=settings.backend,
            heartbeat_ms=settings.heartbeat_ms,
            link_timeout_ms=settings.link_timeout_ms,
        )
        self._loop = ControlLoop(f"llm-datadist-control-{settings.cluster_id}")
        self._driver = LinkDriver(identity, settings.retry_count, handler, random_token, self._loop, calls)
        self.log = self._driver.log
        self._loop.before_wait = self._driver.flush_posted
        self._loop.on_late = self._driver.forgive
        self._listeners = Listeners(self._loop, self._driver.accept, handler.refuse_data_socket)
        self._tickets = itertools.count(1)

    def start(self) -> None:
        """Binds the listener and starts the control thread. When it has raised, it is stopped.

        Raises:
            LLMException: LLM_FAILED: it cannot listen; the text has the address and the system's reason.
                LLM_OUT_OF_MEMORY: there is no thread, or there are no descriptors.
        """
        listen = self._settings.listen
        try:
            place = None if listen is None else find_place(listen)
            self.open()
            self._listen_on(place)
            self._loop.start()
        except BaseException:
            self.stop("it could not be started")
            raise

    def open(self) -> None:
        """Takes what ``add_reader`` needs, before ``start``. Idempotent.

        Raises:
            OutOfMemoryError: There are no descriptors.
        """
        if not self._loop.is_open:
            with named("the control thread has no descriptors"):
                self._loop.open()

    # ---- listening ---------------------------------------------------------------------------------

    @property
    def listen_address(self) -> Address | None:
        """Where it listens, numeric, with the real port; None when it does not."""
        return self._listeners.first

    def listen_on(self, address: Address | None) -> None:
        """Listens there instead of where the options had it; None: only where comms want it.

        Raises:
            LLMException: LLM_FAILED: it cannot listen there; it listens where it did.
        """
        place = None if address is None else find_place(address)
        self._ask(lambda: self._listen_on(place))

    def _listen_on(self, place: Place | None) -> None:
        self._listeners.listen_on(place)
        self._tell_identity()

    def hold(self, candidates: Sequence[Address]) -> Held:
        """See ``Listeners.hold``."""
        return self._ask(lambda: self._listeners.hold(candidates))

    def release(self, held: Held) -> None:
        """See ``Listeners.release``; nothing to do any more after ``stop``."""
        self._on_control(lambda: self._listeners.release(held))

    def set_role(self, role: int) -> None:
        """What peers of later links are told."""
        self._role = role
        self._on_control(self._tell_identity)

    def _tell_identity(self) -> None:
        self._driver.mine = msgspec.structs.replace(
            self._driver.mine, role=self._role, listens_at=self._advertised()
        )

    def _advertised(self) -> str:
        """Where peers may dial us, if the options say so; else they know the address that they dialled."""
        main, ip = self._listeners.main, self._settings.advertise_ip
        return "" if main is None or not ip else str(Address(ip, main.port))

    # ---- links -------------------------------------------------------------------------------------

    def dial(
        self,
        targets: Sequence[Target],
        timeout_s: float,
        on_cut: Callable[[Callable[[], object]], None] = lambda cancel: None,
    ) -> list[LLMStatusCode]:
        """Links with all targets in parallel; blocks at most ``timeout_s``.

        ``on_cut`` is given what gives up all that is not linked yet.

        Returns:
            One code per target: LLM_SUCCESS, LLM_ALREADY_LINK, LLM_LINK_FAILED, LLM_TIMEOUT,
            LLM_PARAM_INVALID (the sides differ in mode), LLM_ENGINE_FINALIZED, or what the handler of
            either side refused with. ``link_error`` has the reason.
        """
        if self._loop.on_thread():
            raise RuntimeError("dial waits for the control thread and cannot be called on it")
        deadline = time.monotonic() + timeout_s
        results = _Results(len(targets))
        tickets = [next(self._tickets) for _ in targets]

        def begin() -> None:
            for index, (ticket, target) in enumerate(zip(tickets, targets, strict=True)):
                self._driver.dials.begin(ticket, target, deadline, results.setter(index))

        if not self._loop.call_soon(begin):
            return [LLMStatusCode.LLM_ENGINE_FINALIZED] * len(targets)
        on_cut(lambda: self._loop.call_soon(lambda: self._driver.dials.cancel(tickets)))
        results.wait(timeout_s + GRACE_S)
        return results.codes()

    def dial_quietly(
        self, target: Target, deadline: float, done: Callable[[LLMStatusCode], None]
    ) -> Callable[[], None]:
        """One attempt without a log record; control thread only, ``done`` is called there, once.

        Returns:
            What gives the attempt up; it does nothing once ``done`` was called.
        """
        ticket = next(self._tickets)
        self._driver.dials.begin(ticket, target, deadline, done, quiet=True)
        return lambda: self._driver.dials.cancel([ticket])

    def get(self, cluster_id: int) -> Link | None:
        """The link to that cluster, up or silent."""
        return self._driver.link_of(cluster_id)

    def links(self) -> list[Link]:
        """All links, up or silent, by cluster id."""
        return self._driver.links()

    def drop(self, link: Link, reason: str, *, tell: bool) -> None:
        """Takes the link down; ``on_down`` has run when this returns. ``tell``: Bye(reason) goes first."""
        self._on_control(lambda: self._driver.drop(link, reason, tell=tell))

    def link_error(self, cluster_id: int) -> str | None:
        """Why the last dial of that cluster failed; None after a success."""
        return self._driver.dials.errors.get(cluster_id)

    def note_error(self, cluster_id: int, text: str) -> None:
        """Why that cluster, which was to dial us, is not linked; control thread only."""
        self._driver.dials.errors[cluster_id] = text

    def ping(self, link: Link, deadline: float) -> None:
        """Returns when the peer has answered.

        Raises:
            LinkLost: The link is down.
            TimeoutError: No answer by the deadline, an instant of ``time.monotonic()``.
        """
        pending = link.call(Ping(id=link.next_id()))
        try:
            pending.wait(deadline)
        finally:
            pending.close()

    # ---- the control thread for others ---------------------------------------------------------------

    def on_control_thread(self) -> bool:
        """Whether the caller is the control thread, which must not wait for anything."""
        return self._loop.on_thread()

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` on the control thread; not any more after ``stop``."""
        self._loop.call_soon(fn)

    def run(self, fn: Callable[[], object]) -> bool:
        """Runs ``fn`` on the control thread and waits for it; False when that thread has ended."""
        return self._on_control(fn)

    def call_at(self, when: float, fn: Callable[[], None]) -> TimerHandle:
        """Runs ``fn`` on the control thread at an instant of ``time.monotonic()``."""
        return self._loop.call_at(when, fn)

    def add_reader(self, sock: socket.socket, fn: Callable[[], float | None]) -> None:
        """Calls ``fn`` on the control thread whenever ``sock`` is readable.

        It says for how long it wants to be left alone then, in seconds; 0: not at all. None: the same, and it has
        not looked for newcomers, with whom peers that dial share the time of the control thread.

        Raises:
            OSError: The system cannot watch another socket; on the control thread, or before ``start``.
        """

        def on_ready(events: int) -> None:
            began = time.monotonic()
            pause_s = fn()
            if pause_s is not None:
                now = time.monotonic()
                self._driver.newcomers.spend(now - began)
                pause_s = max(pause_s, self._driver.newcomers.rest_s(now))
            if pause_s:
                self._loop.rest(sock, pause_s)

        self._on_control(lambda: self._loop.register(sock, selectors.EVENT_READ, on_ready))

    def remove_reader(self, sock: socket.socket) -> None:
        """Ends ``add_reader``; call it before the socket is closed. Idempotent."""
        self._on_control(lambda: self._loop.unregister(sock))

    def _on_control(self, fn: Callable[[], object]) -> bool:
        """Runs ``fn`` on the control thread and waits for it; False when that thread has ended."""
        if self._loop.on_thread() or self._starting:
            fn()
            return True
        if not self._loop.started:
            return False
        ended = Latch()

        def run() -> None:
            try:
                fn()
            finally:
                ended.open()

        if not self._loop.call_soon(run):
            return False
        ended.wait()
        return True

    @property
    def _starting(self) -> bool:
        """Whether the caller is the thread that starts this, which then does what the control thread will do."""
        return self._loop.is_open and not self._loop.started

    def _ask(self, fn: Callable[[], T]) -> T:
        """What ``fn`` returns or raises on the control thread."""
        results: list[T] = []
        errors: list[LLMException] = []

        def run() -> None:
            try:
                results.append(fn())
            except LLMException as error:
                errors.append(error)
            except (OSError, MemoryError) as error:
                errors.append(failure_of("the control thread cannot do it", error))

        self._on_control(run)
        if errors:
            raise errors[0]
        if not results:
            raise EngineFinalizedError("the engine was finalized meanwhile; call init again")
        return results[0]

    # ---- the end -------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Says Bye to all peers, tells the handler, ends the thread, closes everything. Idempotent."""

        def end() -> None:
            self._listeners.close()
            self._driver.stop(reason)

        if self._loop.on_thread() or self._starting:
            end()
        else:
            self._loop.call_soon(end)
        self._loop.stop(STOP_S)

    def close_after_fork(self) -> None:
        """In a forked child: closes the child's copies of all descriptors and does nothing else."""
        self._listeners.close_after_fork()
        self._driver.close_after_fork()
        self._loop.close_after_fork()


class _Results:
    """Codes of one call, filled on the control thread, awaited by the caller."""

    def __init__(self, count: int) -> None:
        self._codes: list[LLMStatusCode | None] = [None] * count
        self._missing = count
        self._complete = Latch()
        if not count:
            self._complete.open()

    def setter(self, index: int) -> Callable[[LLMStatusCode], None]:
        def set_code(code: LLMStatusCode) -> None:
            self._codes[index] = code
            self._missing -= 1
            if not self._missing:
                self._complete.open()

        return set_code

    def wait(self, timeout_s: float) -> None:
        self._complete.wait(max(0.0, timeout_s))

    def codes(self) -> list[LLMStatusCode]:
        return [LLMStatusCode.LLM_TIMEOUT if code is None else code for code in self._codes]
