"""One reading agent of a channel, for as long as it is good.

Strategy: NIXL cannot cancel a transfer (releasing one that runs only forgets it, and bytes go on arriving),
but destroying the agent ends its connections. So each channel reads with an agent of its own, which knows
one peer, and a transfer that does not end in time costs that agent: the next read makes another.
Invariants: a session is destroyed when its last user has left; whoever leaves a doomed one waits for that,
so when ``left`` returns nothing of it writes any more. A retired one lets its users finish.
Threads: any; calls of the agent are made one at a time (faster than NIXL's own locks under contention).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from llm_datadist._core.segments import U64
from llm_datadist.transports._nixl import Agent
from llm_datadist.transports.nixl_ranges import Ranges, none

_MAX_TOKENS = 4096  # then a new session is cheaper than what the agent remembers


class NixlBusy(Exception):  # noqa: N818 - an answer
    """This session cannot take that memory in beside what it knows; another one can."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Memory of the peer that it has told us of.

    Attributes:
        id: Its name.
        memory: What kind of memory.
        ranges: Where.
        low: The first address.
        high: The end of the last range.
        metadata: What NIXL needs to read it.
        number: Later ones have higher numbers.
    """

    id: bytes
    memory: str
    ranges: Ranges
    low: int
    high: int
    metadata: bytes
    number: int


class Session:
    """An agent that knows one peer.

    Args:
        agent: Owned by the session from now on.
        peer: Name of the peer's agent.
        first: Connection and memory that are always there; loaded at once.
        scratch: Rows of ours for small reads, of memory "host".
    """

    def __init__(self, agent: Agent, peer: str, first: Source, scratch: U64) -> None:
        self._agent = agent
        self.peer = peer
        self._calls = threading.Lock()
        self._changed = threading.Condition()
        self._users = 0
        self._open = True
        self._destroyed = False
        self.doomed = False
        self._loaded: dict[bytes, Source] = {}
        self._there = Ranges(none())
        self._here: dict[str, Ranges] = {}
        self._known: set[bytes] = set()
        try:
            self.prepare((first,), "host", scratch)
        except BaseException:
            agent.close()
            raise

    # ---- life -----------------------------------------------------------------------------------

    def enter(self) -> bool:
        """One more user; False when it is over."""
        with self._changed:
            if self._open:
                self._users += 1
            return self._open

    def leave(self) -> None:
        """The end of an ``enter``. Of a doomed session: returns when it is destroyed, whatever is raised."""
        with self._changed:
            self._users -= 1
        self._destroy_unused()
        raised: BaseException | None = None
        while self.doomed:
            try:
                with self._changed:
                    while not self._destroyed:
                        self._changed.wait()
                break
            except BaseException as exc:  # a signal handler's: after the wait
                raised = exc
        if raised is not None:
            raise raised

    def retire(self) -> None:
        """No new users; destroyed when the present ones have finished. Idempotent."""
        with self._changed:
            self._open = False
        self._destroy_unused()

    def doom(self) -> None:
        """As ``retire``, and the present users must leave at once: their transfers are cut."""
        self.doomed = True
        self.retire()

    def _destroy_unused(self) -> None:
        with self._changed:
            if self._open or self._users or self._destroyed:
                return
            self._agent.close()
            self._destroyed = True
            self._changed.notify_all()

    # ---- what it knows --------------------------------------------------------------------------

    def prepare(self, sources: tuple[Source, ...], memory: str, rows: U64) -> None:
        """Makes the peer's memory and rows of ours known. Quick when they are.

        Raises:
            NixlBusy: Not in this session.
            NixlRefused: Not at all.
        """
        key = memory.encode() + rows.tobytes()
        if key in self._known and all(source.id in self._loaded for source in sources):
            return
        with self._calls:
            for source in sources:
                self._load(source)
            here = self._here.get(memory) or Ranges(none())
            new = rows[~here.exact(rows)]
            if here.clash(new):
                raise NixlBusy
            if len(new):
                self._agent.register(memory, new)
                self._here[memory] = here.with_(new)
            self._known.add(key)

    def forget(self, memory: str, rows: U64) -> None:
        """Rows of ours that are no longer registered."""
        with self._changed:
            if self._destroyed:
                return
            self._users += 1
        try:
            with self._calls:
                here = self._here.get(memory) or Ranges(none())
                known = rows[here.exact(rows)]
                if len(known):
                    self._agent.deregister(memory, known)
                    self._here[memory] = here.without(known)
                    self._known.clear()
        finally:
            self.leave()

    def _load(self, source: Source) -> None:
        if source.id in self._loaded:
            return
        if not self._has(source):
            # An older source at the same addresses: NIXL would go on using its keys.
            if len(self._loaded) >= _MAX_TOKENS or self._there.touch(source.ranges.pairs).any():
                raise NixlBusy
            self._agent.load(source.metadata)
            self._there = self._there.with_(source.ranges.pairs)
        self._loaded[source.id] = source

    def _has(self, source: Source) -> bool:
        """Whether something newer, or the same under another name, is there for these addresses."""
        return any(
            other.metadata == source.metadata
            or (other.number > source.number and other.ranges.hold(source.ranges.pairs))
            for other in self._loaded.values()
        )

    # ---- transfers ------------------------------------------------------------------------------

    def start(self, there: tuple[str, U64], here: tuple[str, U64], nbytes: U64) -> int | None:
        """See ``Agent.start``."""
        with self._calls:
            return self._agent.start(self.peer, there, here, nbytes)

    def ended(self, transfer: int) -> bool:
        """See ``Agent.ended``."""
        with self._calls:
            return self._agent.ended(transfer)

    def release(self, transfer: int) -> None:
        """See ``Agent.release``."""
        with self._calls:
            self._agent.release(transfer)
