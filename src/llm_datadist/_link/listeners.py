"""All listening ports of one engine: the one that the options ask for, and those of comms.

Invariants: an address is bound once, whoever wants it: a comm that asks for an address that is listened on
already, also as part of a wildcard, shares it. A port is closed when its last user has let go.
Control thread only (or before it is started), but for ``main`` and ``first``.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_datadist._link.listener import Listener, Place, bind, cannot_listen, find_place
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.seam import Address
from llm_datadist._shortages import is_shortage
from llm_datadist._wire.messages import DataHello
from llm_datadist.status import LLMException

_ANY_IPV4, _ANY_IPV6 = "0.0.0.0", "::"
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV)  # not of this host, or no such interface


@dataclass(slots=True, eq=False)
class _Port:
    listener: Listener
    users: int = 1


@dataclass(frozen=True, slots=True)
class Held:
    """What a comm listens on; given back with ``Listeners.release``."""

    ports: tuple[_Port, ...]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where, numeric; a wildcard that is shared among them."""
        return tuple(port.listener.address for port in self.ports)


class Listeners:
    """The ports of one LinkService.

    Args:
        loop: The control thread.
        on_accept: Gets each connection and the peer's address; returns for how long to accept no more.
        refuse_data: Answers a data connection that cannot be taken.
    """

    def __init__(
        self,
        loop: ControlLoop,
        on_accept: Callable[[socket.socket, str], float],
        refuse_data: Callable[[socket.socket, DataHello, str], None],
    ) -> None:
        self._loop = loop
        self._on_accept = on_accept
        self._refuse_data = refuse_data
        self._ports: list[_Port] = []
        self._main: _Port | None = None
        self._wanted: Address | None = None  # what ``listen_on`` was asked for last

    @property
    def main(self) -> Address | None:
        """Where the options have it listen, with the real port. Any thread."""
        main = self._main
        return None if main is None else main.listener.address

    @property
    def first(self) -> Address | None:
        """The address of the options, else one of a comm. Any thread."""
        ports = list(self._ports)
        return self.main or (ports[0].listener.address if ports else None)

    def listen_on(self, place: Place | None) -> None:
        """Listens there instead of where it did; None: nowhere. The same address again: nothing happens.

        Raises:
            LLMException: LLM_FAILED: it cannot be bound; it listens where it did, unless the text names that address.
        """
        old = self._main
        wanted = None if place is None else place.address
        if old is not None and wanted in (self._wanted, old.listener.address):
            return
        # On one port a wildcard and its parts exclude each other: then the old one must go first.
        goes_first = old is not None and wanted is not None and old.listener.address.port == wanted.port
        if goes_first:
            self._let_go(old)
        try:
            self._main = None if place is None else self._take(place)
        except LLMException:
            if goes_first and old is not None:
                self._main = None
                self._main = self._take(find_place(old.listener.address))
            raise
        self._wanted = wanted
        if not goes_first:
            self._let_go(old)

    def hold(self, candidates: Sequence[Address]) -> Held:
        """Listens on those of the candidates, IP addresses, that are local.

        Raises:
            LLMException: LLM_FAILED: some are local, but none of them can be bound; or there are no descriptors.
        """
        taken: list[_Port] = []
        failure: LLMException | None = None
        for address in candidates:
            try:
                taken.append(self._take(find_place(address)))
            except LLMException as error:
                if error.__cause__ is not None and is_shortage(error.__cause__):
                    self.release(Held(tuple(taken)))
                    raise
                if not _is_elsewhere(error):
                    failure = failure or error
        if failure is not None and not taken:
            raise failure
        return Held(tuple(taken))

    def release(self, held: Held) -> None:
        """Lets go of what ``hold`` gave; once."""
        for port in held.ports:
            self._let_go(port)

    def close(self) -> None:
        """Closes all ports."""
        for port in self._ports:
            port.listener.close()
        self._ports.clear()

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptors."""
        for port in list(self._ports):
            port.listener.close_after_fork()

    def _take(self, place: Place) -> _Port:
        for port in self._ports:
            if _covers(port.listener.address, place.address):
                port.users += 1
                return port
        port = _Port(self._open(place))
        self._ports.append(port)
        return port

    def _open(self, place: Place) -> Listener:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(bind(place))
            try:
                listener = Listener(self._loop, sock, self._on_accept, self._refuse_data)
                undo.callback(listener.close)
                listener.open()
            except OSError as error:
                raise cannot_listen(place.address, error) from error
            undo.pop_all()
        return listener

    def _let_go(self, port: _Port | None) -> None:
        if port is None or port not in self._ports:
            return
        port.users -= 1
        if port.users == 0:
            self._ports.remove(port)
            port.listener.close()


def _covers(bound: Address, wanted: Address) -> bool:
    """Whether who listens on ``bound`` hears what is sent to ``wanted``. Port 0 is a port of its own."""
    if bound.port != wanted.port:
        return False
    if bound.host in (wanted.host, _ANY_IPV6):
        return True
    return bound.host == _ANY_IPV4 and ":" not in wanted.host


def _is_elsewhere(error: LLMException) -> bool:
    """Whether an address cannot be bound because it is not of this host."""
    cause = error.__cause__
    return isinstance(cause, socket.gaierror) or (isinstance(cause, OSError) and cause.errno in _NOT_HERE)
