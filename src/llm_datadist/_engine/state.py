"""What the parts of one engine share: the lock and everything under it.

Thread rule: ``lock`` guards registry, leases, flights and the peers' tables. Nothing that blocks,
logs user objects or calls back happens under it: decide under the lock, act outside.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from llm_datadist._core import limits
from llm_datadist._core.budget import Budget
from llm_datadist._core.leases import Leases
from llm_datadist._core.options import Options
from llm_datadist._core.registry import GenerationWord, KeyName, Record, Registry
from llm_datadist._core.remote_table import RemoteCache, RemoteTable
from llm_datadist._core.sources import Sources
from llm_datadist._engine import codec
from llm_datadist._engine.dropped import Dropped
from llm_datadist._engine.errands import Desk, Errand
from llm_datadist._engine.flights import Flights
from llm_datadist._engine.pools import Pools
from llm_datadist._engine.push_threads import PushThreads
from llm_datadist._engine.regions import Regions
from llm_datadist._engine.routes import Routes
from llm_datadist._engine.ways import Way
from llm_datadist._engine.workers import Workers
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._link.service import LinkService
from llm_datadist._waiting import Changes, guard
from llm_datadist._wire.framing import Buffer, ProtocolError
from llm_datadist._wire.messages import CacheEntry, Message
from llm_datadist.caches import Cache
from llm_datadist.devices.slab import Slab
from llm_datadist.devices.writability import Again, Writability
from llm_datadist.status import (
    CacheNotExistError,
    EngineFinalizedError,
    LinkBusyError,
    LLMException,
    NotLinkedError,
    OutOfMemoryError,
)
from llm_datadist.transports.seam import StreamChannel, TransportCaps, WordChannel

_MOST_COME = 256
_GRACE = 0.1  # of sync_kv_timeout: a call may take its time and a fifth


@dataclass(slots=True, eq=False)
class Peer:
    """What the engine keeps for one link (``Link.context``)."""

    ways: tuple[Way, ...]
    reasons: tuple[str, ...]
    # On which the peer may read us by connections, whatever we read it by.
    serving: StreamChannel | None = None
    words: WordChannel | None = None  # on which words are read faster than on the way of the bytes
    table: RemoteTable = field(default_factory=RemoteTable)
    routes: Routes = field(default_factory=Routes)
    published: Sources[int] = field(default_factory=Sources)  # of ours for our offers: the word of each
    sources: Sources[RemoteCache] = field(default_factory=Sources)  # of the peer's for its offers
    offers: dict[int, object] = field(default_factory=dict)
    parts: int = 0  # of these, that wait or are being read
    closing: int = 0  # unlinks that wait or are being agreed: no new transfers of ours
    unlinked: bool = False  # the peer was told that it may drop the link
    by_clusters: bool = False  # a caller of link_clusters here wants this link
    bytes_out: int = 0
    only_way: Way | None = None
    _counting: threading.Lock = field(default_factory=threading.Lock)
    _bytes_in: int = 0
    _added: int = 0  # how often what has come was
    _come: list[int] = field(default_factory=list)  # and not added yet

    def count_in(self, nbytes: int) -> None:
        """Bytes that we have read of the peer. From any thread: two transfers may end at once."""
        self._come.append(nbytes)  # in one step: a lock takes longer
        if len(self._come) >= _MOST_COME:
            self._add_up()

    @property
    def bytes_in(self) -> int:
        """Bytes that we have read of the peer."""
        with self._counting:  # nothing in here looks for signals
            before, come = self._bytes_in, [*self._come]
        return before + sum(come)

    def _add_up(self) -> None:
        added, come = self._added, [*self._come]
        nbytes, count = sum(come), len(come)
        with self._counting:  # nothing in here looks for signals: a branch might
            is_first = self._added == added  # else another thread has added these
            self._bytes_in += nbytes * is_first
            del self._come[: count * is_first]
            self._added += is_first

    def count_part(self, change: int) -> int:
        """One more or less of them; how many there are now."""
        with self._counting:
            self.parts += change
            return self.parts

    def count_out(self, nbytes: int) -> None:
        """Bytes that the peer says it has read of us."""
        with self._counting:
            self.bytes_out += max(0, nbytes)

    @property
    def transport(self) -> str:
        """The names of its ways."""
        return "+".join(way.name for way in self.ways)

    @property
    def by_address(self) -> bool:
        """Whether some of it is read by address, so that we need addresses."""
        return self.ways[0].caps.one_sided

    def __post_init__(self) -> None:
        """Notes the way that needs no choice: the only one, by address, to all of the memory."""
        way = self.ways[0]
        if len(self.ways) == 1 and way.caps.one_sided and not way.caps.partial:
            self.only_way = way

    def close(self) -> None:
        """Cancels what runs on its channels."""
        for way in self.ways:
            way.channel.close()
        if self.words is not None:
            self.words.close()
        if self.serving is not None:
            self.serving.close()


def peer_of(link: Link) -> Peer:
    """The engine's side of a link."""
    peer = link.context
    if not isinstance(peer, Peer):
        raise TypeError(f"{link!r} has no peer of this engine")
    return peer


def tell(link: Link, message: Message, *attachments: Buffer) -> None:
    """Sends what nobody needs when the link is gone: answers, releases, withdrawals."""
    with contextlib.suppress(LinkLost):
        link.send(message, attachments)


def describe(link: Link) -> str:
    """A peer in an error text."""
    return f"cluster {link.cluster_id} at {link.address}"


def _no_sibling(instance: bytes) -> State | None:
    return None


class State:
    """Shared by the parts of one engine life."""

    def __init__(self, cluster_id: int, options: Options, caps: Mapping[str, TransportCaps]) -> None:
        self.cluster_id = cluster_id
        self.options = options
        self.accessible = options.accessible
        self.caps = caps
        self.lock = guard(self)
        self.condition = Changes(self.lock)  # to wait for a change of what it guards
        self.slab = Slab()
        self.writability = Writability()
        self._memories: dict[int, tuple[Record, Again]] = {}
        self.registry = Registry(self.new_word, self.clear_word)
        self.leases = Leases(self.new_word, self.clear_word)
        self.flights = Flights(self.condition)
        self.desk = Desk(f"llm-datadist-call-{cluster_id}")
        self.workers = Workers("llm-datadist-worker", self._later)
        self.push_threads = PushThreads(self.workers, self._later)
        self.dropped = Dropped(lambda when, look: self.links.call_at(when, look))
        self.pools = Pools(options.pools)
        self.regions = Regions()
        self.links: LinkService
        # By instance: an engine of this process.
        self.find_sibling: Callable[[bytes], State | None] = _no_sibling
        self.by_token: dict[bytes, Link] = {}  # links that are up, the hidden end of a self link included
        self.life = object()  # handles of an earlier life are refused
        self.closed: LLMException | None = None
        self.draining = False  # for good: nothing new begins any more
        self.reader_lost_at = -math.inf  # when a link went down by which our memory may still be read
        self.comm_holds: Counter[int] = Counter()  # comms that want the link to a cluster
        self.comms_alive = 0
        self.tables_nbytes = 0  # of our copies of peers' tables
        self.sources_nbytes = 0  # of the caches that peers have published
        self.offers = Budget(limits.OFFERS_NBYTES, limits.OFFERS_ENGINE_NBYTES)
        self.on_link_change: Callable[[int], None] = lambda cluster_id: None  # control thread; must not block

    @property
    def timeout_s(self) -> float:
        """What one pull or push may take."""
        return self.options.sync_kv_timeout_ms / 1000

    @property
    def grace_s(self) -> float:
        """How long after the time of a call a peer may take to say whether it has stopped or was done."""
        return self.timeout_s * _GRACE

    def new_word(self) -> GenerationWord:
        """A word with a random value; zero is what cleared and fresh memory holds, so never that."""
        value = secrets.randbits(64) | 1
        try:
            return GenerationWord(self.slab.allocate(value), value)
        except MemoryError as exc:
            raise OutOfMemoryError(str(exc)) from exc

    def clear_word(self, word: GenerationWord) -> None:
        """Readers that compare it from now on see that it has changed."""
        self.slab.release(word.address)

    def is_alone(self, link: Link) -> bool:
        """Whether no other peer than this one is linked. The caller holds the lock."""
        return all(other.cluster_id == link.cluster_id for other in self.by_token.values())

    def note_announced(self, peer: Peer, cache: RemoteCache, *, more_keys: bool) -> None:
        """Enters a cache into our copy of a peer's table, while there is room. The caller holds the lock."""
        table = peer.table
        before = table.nbytes
        room = min(limits.TABLE_NBYTES, before + limits.TABLES_NBYTES - self.tables_nbytes)
        table.put(cache, more_keys=more_keys, most_nbytes=room)
        self.tables_nbytes += table.nbytes - before

    def note_withdrawn(self, peer: Peer, cache_ids: Iterable[int]) -> None:
        """These caches of a peer are in its table no more, nor published. The caller holds the lock."""
        before, published = peer.table.nbytes, peer.sources.nbytes
        for cache_id in cache_ids:
            peer.table.drop(cache_id)
            peer.sources.drop(cache_id)
        self.tables_nbytes += peer.table.nbytes - before
        self.sources_nbytes += peer.sources.nbytes - published

    def note_published(self, peer: Peer, cache: RemoteCache, nbytes: int) -> None:
        """Enters a cache that a peer's offers may read. The caller holds the lock.

        Raises:
            ProtocolError: All peers together have published too much.
        """
        before = peer.sources.nbytes
        peer.sources.put(cache.cache_id, cache, nbytes)
        self.sources_nbytes += peer.sources.nbytes - before
        if self.sources_nbytes > limits.SOURCES_ENGINE_NBYTES:
            raise ProtocolError(
                f"what is known of the caches that peers have published takes {self.sources_nbytes >> 20} MiB"
            )

    def is_read_registered(self, link: Link) -> bool:
        """Whether the peer reads by an engine that knows our memory by registration."""
        return any(caps.needs_registration and name in link.peer_reads_by for name, caps in self.caps.items())

    def memory_of(self, record: Record) -> Again:
        """Whether the memory of a cache of ours may be written: prepared once, to be asked again and again."""
        kept = self._memories.get(record.cache_id)
        if kept is not None and kept[0] is record:
            return kept[1]
        sealed = self.pools.has(record.cache_id)
        memory = self.writability.again(record.addresses, record.layout.tensor_nbytes, sealed=sealed)
        with self.lock:
            if self.registry.get(record.cache_id) is record:
                self._memories[record.cache_id] = record, memory
        return memory

    def forget_routes(self, cache_id: int) -> None:
        """No route leads into that cache of ours any more. The caller holds the lock."""
        self._memories.pop(cache_id, None)
        for link in self.by_token.values():
            peer_of(link).routes.forget(cache_id)

    def do_elsewhere(self, job: Callable[[], bool]) -> bool:
        """Does it on a thread that no signal strikes, for a caller's thread that waits; here if there is none."""
        errand = Errand("cancel", self.desk, lambda _: job())
        try:
            return errand.run()
        except OutOfMemoryError:
            return job()

    def _later(self, seconds: float, fn: Callable[[], None]) -> None:
        self.links.call_at(time.monotonic() + seconds, fn)

    def run_callbacks(self, job: Callable[[], None]) -> None:
        """Runs code of the user's here, or on a worker when here is the control thread, which it would hold up."""
        if not self.links.on_control_thread() or not self.workers.submit(job, job):
            job()

    def check_open(self) -> None:
        """Raises when the engine was finalized."""
        if self.closed is not None:
            raise EngineFinalizedError(str(self.closed))

    def check_admitting(self) -> None:
        """Raises when new transfers are refused, to our callers and to peers."""
        if self.draining:
            raise LinkBusyError(
                f"cluster {self.cluster_id} is draining: it begins no new transfers; use another one, or finalize and "
                "init it again"
            )

    def record_of(self, cache: Cache) -> Record:
        """The registered cache behind a handle. The caller holds the lock.

        Raises:
            CacheNotExistError: Unregistered, or of another engine or an earlier life.
        """
        if not cache.belongs_to(self.life):
            raise CacheNotExistError(
                f"cache {cache.cache_id} was not registered with this engine since its init; register it again"
            )
        record = self.registry.get(cache.cache_id)
        if record is None:
            raise CacheNotExistError(
                f"cache {cache.cache_id} is not registered (any more); register it before use"
            )
        return record

    def link_to(self, cluster_id: int) -> Link:
        """The link to a cluster.

        Raises:
            NotLinkedError: There is none, or it is being unlinked.
        """
        link = self.links.get(cluster_id)
        if link is None:
            why = self.links.link_error(cluster_id)
            hint = f"; the last attempt failed: {why}" if why else ""
            raise NotLinkedError(f"there is no link to cluster {cluster_id}; call link_clusters first{hint}")
        if peer_of(link).closing:
            raise NotLinkedError(f"the link to {describe(link)} is being unlinked; call link_clusters again")
        return link

    def shows_addresses(self, link: Link) -> bool:
        """Whether a peer gets the addresses of our caches, because it reads by address."""
        by = link.peer_reads_by
        return any(caps.one_sided for name, caps in self.caps.items() if name in by)

    def shown_to(
        self, link: Link, record: Record, bindings: Iterable[tuple[KeyName, int, GenerationWord]] = ()
    ) -> tuple[CacheEntry, Buffer]:
        """A cache of ours as a peer gets it: its entry, and its addresses if the peer reads by address.

        Args:
            link: To the peer.
            record: The cache.
            bindings: Keys that find it (``Registry.bindings_of``).
        """
        token = self.regions.token(record.cache_id, link.peer_reads_by)
        addresses = codec.raw(record.addresses) if self.shows_addresses(link) else b""
        return codec.entry_of(record, bindings, token), addresses
