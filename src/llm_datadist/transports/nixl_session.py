"""One reading agent of a channel, for as long as it is good.

Strategy: NIXL cannot cancel a transfer (releasing one that runs only forgets it, and bytes go on arriving),
but destroying the agent ends its connections. So each channel reads with an agent of its own, which knows
one peer, and a transfer that does not end in time costs that agent: the next read makes another.
Invariants: a session is destroyed when its last user has left; whoever leaves a doomed one waits for that,
so when ``leave`` returns nothing of it writes any more. A retired one lets its users finish. A user that is
over and has not left was broken off (``nixl_use``): whoever looks next dooms the session.
Threads: any; calls of the agent are made one at a time (faster than NIXL's own locks under contention).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.segments import U64
from llm_datadist._waiting import Latch, guard
from llm_datadist.transports._nixl import Agent, NixlLost, NixlRefused
from llm_datadist.transports.nixl_ranges import Ranges, none
from llm_datadist.transports.nixl_use import Use, used

_MAX_WORDS = 64  # that are kept: a pull looks at one or two words, twice
_WORD = 8
_LOOK_S = 0.1  # between two looks for users that were broken off


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
    """An agent that knows one peer, once it has begun.

    Args:
        agents: Makes the agent.
        peer: Name of the peer's agent.
        first: Connection and memory that are always there; loaded at once.
        scratch: Rows of ours for small reads, of memory "host".
    """

    def __init__(self, agents: Callable[[str], Agent], peer: str, first: Source, scratch: U64) -> None:
        self._agents = agents
        self._made: list[Agent] = []
        self.peer = peer
        self._first = first
        self._scratch = scratch
        self._calls = guard(self)
        self._lock = guard(self)
        self._users: set[Use] = set()
        self._open = True
        self._ended: list[int] | None = None
        self._destroyed = Latch()
        self.doomed = False
        self._loaded: dict[bytes, Source] = {}
        self._loaded_nbytes = 0
        self._there = Ranges(none())
        self._here: dict[str, Ranges] = {}
        self._known: set[bytes] = set()
        self._cells = np.zeros(_MAX_WORDS, dtype="<u8")
        self._free_cells = list(range(_MAX_WORDS))
        self._words: dict[int, Word] = {}  # that nobody uses; the one last used is last

    def begin(self) -> None:
        """Makes the agent. Whatever is raised, the session is to be retired."""
        self._made.extend(map(self._agents, (secrets.token_hex(12),)))  # noted as it is made
        cells = int(self._cells.ctypes.data)
        own = np.array([[cells, cells + self._cells.nbytes]], dtype=np.uint64)
        self.prepare((self._first,), "host", np.concatenate((self._scratch, own)))

    # ---- life -----------------------------------------------------------------------------------

    def enter(self, use: Use) -> bool:
        """One more user, with something under way until it says otherwise; False when it is over."""
        use.session = self  # before it counts: it leaves from here on, whatever happens
        with self._lock:
            self._look_after_users()
            if not self._open:
                use.session = None
                return False
            use.under_way = True
            self._users.add(use)
            return True

    def has(self, use: Use) -> bool:
        """Whether it has not left, and the agent lives."""
        return use in self._users

    def leave(self, use: Use) -> None:
        """The end of an ``enter``, idempotent. A doomed session is destroyed when it returns, or raises."""
        with self._lock:
            self._users.discard(use)
            over = self.doomed or not self._open
        if not over:
            return
        self._destroy_unused()
        raised: BaseException | None = None
        while self.doomed:
            try:
                if self._destroyed.wait(_LOOK_S):
                    break
                self._destroy_unused()
            except BaseException as exc:  # a signal handler's: after the wait
                raised = exc
        if raised is not None:
            raise raised

    def retire(self) -> None:
        """No new users; destroyed when the present ones have finished. Idempotent."""
        with self._lock:
            self._open = False
        self._destroy_unused()

    def doom(self) -> None:
        """As ``retire``, and the present users must leave at once: their transfers are cut."""
        self.doomed = True
        self.retire()

    @property
    def is_destroyed(self) -> bool:
        """Whether nothing is left of it."""
        return self._destroyed.is_open

    def _look_after_users(self) -> None:
        """The caller holds the lock."""
        if any([use.is_over for use in self._users.copy()]):
            self.doomed, self._open = True, False

    def _has_users(self) -> bool:
        return any([not use.is_over for use in self._users.copy()])

    def _destroy_unused(self) -> None:
        with self._lock:
            self._look_after_users()
            if self._open or self._destroyed.is_open or self._has_users():
                return
            if self._ended is None:
                self._ended = [word.transfer for word in self._words.values()]
            for agent in self._made:
                agent.close(self._ended)
            self._users.clear()
            self._destroyed.open()

    # ---- what it knows --------------------------------------------------------------------------

    def prepare(self, sources: tuple[Source, ...], memory: str, rows: U64) -> None:
        """Makes the peer's memory and rows of ours known, for a user. Quick when they are.

        Raises:
            NixlBusy: Not in this session.
            NixlRefused: Not at all.
        """
        key = memory.encode() + rows.tobytes()
        if key in self._known and self.knows(sources):
            return
        with self._calls:
            for source in sources:
                self._load(source)
            here = self._here.get(memory) or Ranges(none())
            new = rows[~here.exact(rows)]
            if here.clash(new):
                raise NixlBusy
            if len(new):
                self._made[0].register(memory, new)
                self._here[memory] = here.with_(new)
            self._known.add(key)

    def forget(self, memory: str, rows: U64) -> None:
        """Rows of ours that are no longer registered. When it returns nothing that was broken off writes there."""
        used(lambda use: self._forget(use, memory, rows))

    def _forget(self, use: Use, memory: str, rows: U64) -> None:
        use.session = self
        with self._lock:
            self._look_after_users()
            self._users.add(use)
        use.under_way = True  # broken off, nobody knows what the agent has registered
        with self._calls:
            here = self._here.get(memory) or Ranges(none())
            known = rows[here.exact(rows)]
            if len(known) and not self.doomed and not self._destroyed.is_open:
                self._made[0].deregister(memory, known)
                self._here[memory] = here.without(known)
                self._known.clear()
        use.under_way = False

    def knows(self, sources: tuple[Source, ...]) -> bool:
        """Whether memory of the peer is known."""
        return all([source.id in self._loaded for source in sources])

    def _load(self, source: Source) -> None:
        if source.id in self._loaded:
            return
        nbytes = self._loaded_nbytes + (len(source.metadata) if source is not self._first else 0)
        if len(self._loaded) >= limits.NIXL_TOKENS or nbytes > limits.NIXL_SOURCES_NBYTES:
            raise NixlBusy
        if not self._has(source):
            # An older source at the same addresses: NIXL would go on using its keys.
            if self._there.touch(source.ranges.pairs).any():
                raise NixlBusy
            self._made[0].load(source.metadata)
            self._there = self._there.with_(source.ranges.pairs)
        self._loaded[source.id] = source
        self._loaded_nbytes = nbytes

    def _has(self, source: Source) -> bool:
        """Whether something newer, or the same under another name, is there for these addresses."""
        for other in self._loaded.values():
            newer = other.number > source.number and other.ranges.hold(source.ranges.pairs)
            if newer or other.metadata == source.metadata:
                return True
        return False

    # ---- transfers ------------------------------------------------------------------------------

    def start(self, there: tuple[str, U64], here: tuple[str, U64], nbytes: U64) -> int | None:
        """Begins a read of pieces, see ``Agent.make``; None when it has ended already."""
        with self._calls:
            transfer = self._made[0].make(self.peer, there, here, nbytes)
            try:
                if not self._made[0].post(transfer):
                    return transfer
            except (NixlLost, NixlRefused):
                self._made[0].release(transfer)
                raise
            self._made[0].release(transfer)
            return None

    def ended(self, transfer: int) -> bool:
        """See ``Agent.ended``."""
        with self._calls:
            return self._made[0].ended(transfer)

    def release(self, transfer: int) -> None:
        """See ``Agent.release``."""
        with self._calls:
            self._made[0].release(transfer)

    # ---- words ----------------------------------------------------------------------------------

    def read_word(self, address: int) -> Word | int | None:
        """Begins a kept read of this address. None: there is none, or it is in use.

        Returns:
            The word, if the read has ended at once; else the read, for the caller alone until ``keep_word``.
        """
        with self._calls:
            word = self._words.pop(address, None)  # who is interrupted must not leave it there, under way
            if word is None:
                return None
            word.clear()
            try:
                if not self._made[0].post(word.transfer):
                    return word
            except (NixlLost, NixlRefused):
                self._free(word)
                raise
            self._words[address] = word
            return word.value

    def make_word(self, memory: str, address: int) -> Word | None:
        """Makes a read of memory that is known, for the caller alone; None when too many are in use."""
        with self._calls:
            if not self._free_cells and not self._forget_word():
                return None
            cell = self._free_cells.pop()
            here = np.array([self._cells.ctypes.data + cell * _WORD], dtype=np.uint64)
            there, nbytes = np.array([address], dtype=np.uint64), np.array([_WORD], dtype=np.uint64)
            try:
                transfer = self._made[0].make(self.peer, (memory, there), ("host", here), nbytes)
            except BaseException:
                self._free_cells.append(cell)
                raise
            return Word(self._cells[cell : cell + 1], cell, transfer)

    def keep_word(self, address: int, word: Word) -> None:
        """The end of a use: it has not begun, or has ended well."""
        with self._calls:
            if address not in self._words:
                self._words[address] = word
            else:
                self._free(word)

    def _forget_word(self) -> bool:
        """Frees the one that was not used for longest."""
        if not self._words:
            return False
        self._free(self._words.pop(next(iter(self._words))))
        return True

    def _free(self, word: Word) -> None:
        self._made[0].release(word.transfer)
        self._free_cells.append(word.cell)


class Word:
    """A read of one word of the peer, made to be posted again and again.

    Args:
        memory: Where it arrives.
        cell: Its number in the session.
        transfer: Of the session's agent.
    """

    __slots__ = ("_memory", "cell", "transfer")

    def __init__(self, memory: U64, cell: int, transfer: int) -> None:
        self._memory = memory
        self.cell = cell
        self.transfer = transfer

    def clear(self) -> None:
        """Before each read: a transfer that brings nothing must not show what an earlier one brought."""
        self._memory[0] = 0

    @property
    def value(self) -> int:
        """What has arrived."""
        return int(self._memory[0])
