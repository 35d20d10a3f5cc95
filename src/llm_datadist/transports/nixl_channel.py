"""The way to one peer's registered memory with NIXL.

Strategy: what the peer has told of (its tokens) is kept, the latest first; a read uses the latest token that
holds its source. Sessions are made when they are needed and thrown away when anything went wrong, so an
agent never outlives what it believes.
Threads: any. ``close`` never waits for the lock that the making of a session holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist._waiting import guard
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.transports import _libc
from llm_datadist.transports._nixl import Agent, NixlLost, NixlRefused
from llm_datadist.transports.nixl_again import NixlRows, fit_one_step, word_again
from llm_datadist.transports.nixl_ranges import none, spans
from llm_datadist.transports.nixl_read import Copy, NixlRead, Pace
from llm_datadist.transports.nixl_session import NixlBusy, Session, Source
from llm_datadist.transports.nixl_small import Scratch, Small
from llm_datadist.transports.nixl_told import ALWAYS, ID_NBYTES, Endpoint, Held, Token, places_of, source_of
from llm_datadist.transports.nixl_use import Use, used
from llm_datadist.transports.seam import Fault, FaultKind, TransportUnavailable

_PROBE_S = 0.5
_PROBE_SLEEP_S = 0.0005

Locate = Callable[[Extents], "tuple[str, U64] | None"]
"""Memory and rows of ours that hold a destination."""


def _metadata_nbytes(source: Source | None) -> int:
    return 0 if source is None else len(source.metadata)


class NixlChannel:
    """Reads one peer.

    Args:
        agents: Makes agents.
        endpoint: The peer's.
        locate: Finds registered memory of ours.
        linger_s: How long a transfer may go on when it should stop, before its session is cut.
        held: What all channels keep.
        forget: Called when closed.
    """

    def __init__(
        self,
        agents: Callable[[str], Agent],
        endpoint: Endpoint,
        locate: Locate,
        linger_s: float,
        held: Held,
        forget: Callable[[NixlChannel], None],
    ) -> None:
        self._agents = agents
        self._endpoint = endpoint
        self._locate = locate
        self._forget = forget
        self._linger_s = linger_s
        self.linger_s = 0.0  # until it is proven: nothing of a first read is worth waiting for
        self.pace = Pace()
        self.closed = False
        self.proven = False
        self._scratch = Scratch()
        self._making = guard(self)
        self._session: Session | None = None
        self._sessions: list[Session] = []  # those that are not destroyed
        self._admitting = guard(self)
        self._number = 0
        always = source_of(b"", endpoint.agent, "host", endpoint.rows, endpoint.metadata, ALWAYS)
        if isinstance(always, str):
            raise TransportUnavailable(f"the peer's endpoint of transport nixl is not valid: {always}")
        if not always.ranges.hold(places_of(endpoint)):
            raise TransportUnavailable(
                "the peer's endpoint of transport nixl is not valid: its proof is not in what it tells of"
            )
        self._always = always
        self._sources: dict[bytes, Source | None] = {}  # None: no good
        self._nbytes = 0  # of their metadata
        self._held = held
        self._last: tuple[Extents | None, tuple[Source, ...]] = None, ()
        self._last_here: tuple[Extents | None, tuple[str, U64] | None] = None, None

    def prove(self, deadline: float) -> None:
        """Reads the proof.

        Raises:
            TransportUnavailable: It cannot be read, or is another one.
        """
        answer = self._read_small(self._endpoint.proof_address, PROOF_NBYTES, deadline)
        if isinstance(answer, Fault):
            raise TransportUnavailable(f"a first read with NIXL failed: {answer.text}")
        if answer != self._endpoint.proof:
            raise TransportUnavailable("NIXL reaches another process than the one of the handshake")
        self.proven = True
        self.linger_s = self._linger_s

    # ---- what is within reach -------------------------------------------------------------------

    def admit(self, token: bytes) -> None:
        """See ``RegisteringChannel``."""
        name = token[:ID_NBYTES]
        if name in self._sources:
            return
        try:
            told = msgspec.msgpack.decode(token[ID_NBYTES:], type=Token)
            self._number += 1
            found = source_of(name, told.agent, told.memory, told.rows, told.metadata, self._number)
        except msgspec.MsgspecError as exc:
            found = str(exc)
        right = isinstance(found, Source) and told.agent == self._endpoint.agent
        source = found if right and isinstance(found, Source) else None
        with self._admitting:
            if self.closed:
                return
            self._last = None, ()
            while self._sources and self._is_full(_metadata_nbytes(source)):
                self._drop_source(next(iter(self._sources)))
            self._keep_source(name, source)

    def _is_full(self, nbytes: int) -> bool:
        """Whether something must go before so many bytes more are kept. The caller holds ``_admitting``."""
        return (
            len(self._sources) >= limits.NIXL_SOURCES
            or self._nbytes + nbytes > limits.NIXL_SOURCES_NBYTES
            or self._held.nbytes + nbytes > limits.NIXL_SOURCES_ENGINE_NBYTES
        )

    def _keep_source(self, name: bytes, source: Source | None) -> None:
        self._sources[name] = source
        self._count(_metadata_nbytes(source))

    def _drop_source(self, name: bytes) -> None:
        self._count(-_metadata_nbytes(self._sources.pop(name)))

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._held.add(nbytes)

    def settle(self, *, deadline: float) -> bool:
        """Nothing is on its way."""
        return True

    @property
    def refusal(self) -> str:
        """Nothing: what is there was there when it was opened."""
        return ""

    def covers(self, source: Extents) -> bool:
        """See ``PartialChannel``."""
        return not self.closed and (not source.nbytes or bool(self._find(source)))

    def holds(self, destination: Extents) -> bool:
        """See ``RegisteringChannel``."""
        return not destination.nbytes or self._find_here(destination) is not None

    def distrust(self, sources: tuple[Source, ...]) -> None:
        """See ``Reach``."""
        with self._admitting:
            self._last = None, ()
            for name, other in list(self._sources.items()):
                # Older ones at these addresses are no better; what lives is told again.
                if other is not None and any([other.ranges.touch(s.ranges.pairs).any() for s in sources]):
                    self._drop_source(name)

    def _find(self, extents: Extents) -> tuple[Source, ...]:
        last, found = self._last
        if last is extents:  # ``covers`` comes just before ``read``
            return found
        wanted = spans(extents)
        found = () if wanted is None else self._find_spans(wanted)
        self._last = extents, found
        return found

    def _find_here(self, extents: Extents) -> tuple[str, U64] | None:
        """As ``_find`` for memory of ours: ``holds`` comes just before ``read``."""
        last, found = self._last_here
        if last is not extents:
            found = self._locate(extents)
            self._last_here = extents, found
        return found

    def _find_spans(self, wanted: U64) -> tuple[Source, ...]:
        """The latest sources that hold all of it, of one kind of memory; none if they do not."""
        with self._admitting:
            candidates = [self._always, *self._sources.values()]
        found: list[Source] = []
        low, high = int(wanted[:, 0].min()), int(wanted[:, 1].max())
        for source in reversed(candidates):
            if source is None or source.high <= low or source.low >= high:
                continue
            missing = wanted[source.ranges.find(wanted) < 0]
            if len(missing) < len(wanted) and (not found or found[0].memory == source.memory):
                found.append(source)
                if not len(missing):
                    return tuple(found)
                wanted = missing
        return ()

    # ---- reading --------------------------------------------------------------------------------

    def read(self, plan: Segments) -> NixlRead:
        """Prepares a read; ``plan.source`` must be Extents."""
        if not isinstance(plan.source, Extents):
            raise TypeError("transport nixl reads by address; this plan has a selector")
        if plan.source.nbytes != plan.nbytes:
            raise ValueError(f"the plan reads {plan.source.nbytes} bytes into {plan.nbytes}")
        return NixlRead(self, self._task(plan.source, plan.destination))

    def read_word(self, address: int, *, deadline: float) -> int | Fault:
        """See ``OneSidedChannel``."""
        word = word_again(self, address, deadline)
        if word is not None:
            return word
        answer = self._read_small(address, 8, deadline)
        return answer if isinstance(answer, Fault) else int.from_bytes(answer, "little")

    def rows(self, source: Extents, destination: Extents, nbytes: int) -> NixlRows | None:
        """See ``RowsChannel``."""
        if not fit_one_step(len(source.bases), nbytes):
            return None
        sources, found = self._find(source), self._find_here(destination)
        if not sources or found is None:
            return None
        return NixlRows(self, sources, *found, source.bases, destination.bases, nbytes)

    def _task(self, there: Extents, here: Extents) -> Copy | Fault:
        if not here.nbytes:
            return Copy((), "host", none(), there, here, _libc.can_write_byte)
        sources = self._find(there)
        if not sources:
            return Fault(
                FaultKind.SOURCE, "memory of the peer that it has not registered with NIXL cannot be read"
            )
        found = self._find_here(here)
        if found is None:
            return Fault(
                FaultKind.DESTINATION, "the destination is not within memory that is registered with NIXL"
            )
        return Copy(sources, *found, there, here, _libc.can_write_byte)

    def _read_small(self, address: int, nbytes: int, deadline: float) -> bytes | Fault:
        """At most ``PROOF_NBYTES`` bytes."""
        sources = self.find_one(address, nbytes)
        if not sources:
            text = f"address {address:#x} of the peer is not registered with NIXL"
            return Fault(FaultKind.CANCELLED if self.closed else FaultKind.SOURCE, text)
        return used(lambda use: self._read_placed(use, sources, address, nbytes, deadline))

    def _read_placed(
        self, use: Use, sources: tuple[Source, ...], address: int, nbytes: int, deadline: float
    ) -> bytes | Fault:
        slot = self._scratch.take(use)
        task = Small(sources, self._scratch.rows, address, slot, nbytes)
        fault = NixlRead(self, task).run(use, deadline).fault
        return fault if fault is not None else self._scratch.content(slot, nbytes)

    def find_one(self, address: int, nbytes: int) -> tuple[Source, ...]:
        """See ``Again``."""
        stop = address + nbytes
        if not 0 <= address < stop < 1 << 64:
            return ()
        return self._find_spans(np.array([[address, stop]], dtype=np.uint64))

    # ---- sessions -------------------------------------------------------------------------------

    def current(self, use: Use) -> Session | None:
        """See ``Again``."""
        session = self._session
        return session if session is not None and not self.closed and session.enter(use) else None

    def session(self, use: Use, sources: tuple[Source, ...], memory: str, rows: U64) -> Session:
        """See ``Reach``."""
        with self._making:
            try:
                if len(self._sessions) > 1:
                    self._sweep()
                for _ in range(2):
                    session = self._session or self._make()
                    if session.enter(use):
                        try:
                            session.prepare(sources, memory, rows)
                            return session
                        except NixlBusy:
                            use.under_way = False
                            use.leave()
                    self._drop_made()
                raise NixlRefused("it overlaps what the agent knows")
            finally:
                if self.closed:
                    self._drop_made()

    def lives(self, session: Session, use: Use) -> bool:
        """See ``Reach``."""
        with self._making:
            if self._session is session:
                self._session = None
            try:
                probe = self._session or self._make()
            except (NixlLost, NixlRefused):
                return False
            alive = probe.enter(use) and self._answers(probe, use)
            if not alive or self.closed:
                self._drop_made()
            return alive

    def forget(self, memory: str, rows: U64) -> None:
        """Rows of ours are no longer registered."""
        self._last_here = None, None
        for session in tuple(self._sessions):
            session.forget(memory, rows)

    def close(self) -> None:
        """See ``Channel``."""
        self.closed = True
        with self._admitting:
            for name in tuple(self._sources):
                self._drop_source(name)
        if self._making.acquire(blocking=False):  # else who makes a session sees that we are closed
            try:
                self._drop_made()
            finally:
                self._making.release()
        self._forget(self)

    def _make(self) -> Session:
        self._sweep()
        session = Session(self._agents, self._endpoint.agent, self._always, self._scratch.rows)
        self._sessions.append(session)  # before there is anything to end
        try:
            session.begin()
        except TransportUnavailable as exc:
            raise NixlRefused(str(exc)) from exc
        except NixlRefused as exc:
            raise NixlLost(str(exc)) from exc
        else:
            self._session = session
        finally:
            self._sweep()
        return session

    def _drop_made(self) -> None:
        self._session = None
        self._sweep()

    def _sweep(self) -> None:
        """Ends all but the present one, as far as they are not used; whoever was to do it may have been broken off."""
        for session in tuple(self._sessions):
            if session is not self._session:
                session.retire()
                if session.is_destroyed:
                    self._sessions.remove(session)

    def _answers(self, session: Session, use: Use) -> bool:
        """Whether the nonce can be read."""
        endpoint, slot = self._endpoint, self._scratch.take(use)
        until = time.monotonic() + _PROBE_S
        try:
            task = Small((self._always,), self._scratch.rows, endpoint.nonce_address, slot, PROOF_NBYTES)
            there, here, size = task.pieces(0, PROOF_NBYTES)
            transfer = session.start(("host", there), ("host", here), size)
            while transfer is not None and not session.ended(transfer):
                if time.monotonic() >= until or self.closed:
                    return False
                time.sleep(_PROBE_SLEEP_S)
            if transfer is not None:
                session.release(transfer)
            use.under_way = False
            return self._scratch.content(slot, PROOF_NBYTES) == endpoint.nonce
        except (NixlLost, NixlRefused):
            return False
