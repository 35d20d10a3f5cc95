"""Registering, remapping and unregistering caches, and telling peers of it (mode B)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llm_datadist._core import limits
from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import KeyName, Record, key_of
from llm_datadist._core.segments import U64
from llm_datadist._engine.errands import Call
from llm_datadist._engine.flights import LAST_BYTES_S
from llm_datadist._engine.mapped import check_mapped, checked_addresses, checked_ranges
from llm_datadist._engine.settling import settle
from llm_datadist._engine.state import State, describe, peer_of
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._logs import get_logger
from llm_datadist._wire.messages import Announce, Withdraw
from llm_datadist.caches import Cache, CacheDesc, MemInfo
from llm_datadist.enums import Placement
from llm_datadist.infos import CacheInfo
from llm_datadist.keys import BlocksCacheKey, CacheKey
from llm_datadist.status import CacheNotExistError, ParamInvalidError

_LOG = get_logger("llm_datadist.cache")
_LOST_S = 1.0  # for a peer to notice the end of its link, and to give up what it was reading
_SETTLE_S = 2.0  # for a peer to end a read that is cut off: it may have to give up a connection for that
_LONGEST_WAIT_S = 60.0  # of one wait; the end of what is waited for wakes earlier


@dataclass(frozen=True, slots=True)
class Entered:
    """A cache just entered: the one whose key it took over, and the links that were told."""

    record: Record
    displaced: Record | None
    told: list[Link]


class Catalog:
    """The caches of this engine."""

    def __init__(self, state: State) -> None:
        self._state = state

    def register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: Sequence[CacheKey] | Sequence[BlocksCacheKey],
        *,
        is_blocks: bool,
        remote_accessible: bool | None,
        call: Call,
    ) -> Cache:
        """Enters a cache; all or nothing.

        Raises:
            ParamInvalidError: Shape, addresses or keys break a rule.
        """
        desc = copy.copy(desc)  # update_dim of the caller's must not reach it
        layout = Layout.of(desc)
        addresses = checked_addresses(addrs, layout)
        state = self._state
        tokens = state.regions.register(addresses, layout.tensor_nbytes)
        try:
            with state.lock:
                state.check_open()
                remote_accessible = self._checked_accessible(remote_accessible, desc)
                names = state.registry.check_keys(keys, layout)
                entered = self.enter(
                    desc, layout, addresses, names,
                    is_blocks=is_blocks, remote_accessible=remote_accessible,
                    keep=lambda cache_id: state.regions.keep(cache_id, tokens),
                )  # fmt: skip
        except BaseException:
            state.regions.forget(tokens)
            raise
        return self.finish(entered, call)

    def _checked_accessible(self, asked: bool | None, desc: CacheDesc) -> bool:
        if not self._state.comms_alive:
            return desc.placement == Placement.DEVICE if asked is None else asked
        if asked:
            raise ParamInvalidError(
                "remote_accessible is True, but link() was called before; register caches that peers may access "
                "first, then call link()"
            )
        return False

    def enter(
        self,
        desc: CacheDesc,
        layout: Layout,
        addresses: U64,
        names: tuple[tuple[KeyName, int], ...],
        *,
        is_blocks: bool,
        remote_accessible: bool,
        keep: Callable[[int], None],
    ) -> Entered:
        """Enters a checked cache and posts it to peers. The caller holds the lock, and calls ``finish`` after it.

        ``keep`` notes whose memory it is, before a peer hears of it.
        """
        state = self._state
        word = state.new_word()
        try:
            record, displaced = state.registry.add(
                desc, layout, addresses, names,
                is_blocks=is_blocks, remote_accessible=remote_accessible, word=word,
            )  # fmt: skip
        except BaseException:
            state.clear_word(word)
            raise
        try:
            keep(record.cache_id)
            return Entered(record, displaced, self.announce(record))
        except BaseException:
            self.take_out(record.cache_id)
            raise

    def finish(self, entered: Entered, call: Call) -> Cache:
        """What must not happen under the lock: sends, warns, and makes the handle."""
        call.on_drop(lambda: self._take_back(entered))
        flush(entered.told)
        record, displaced = entered.record, entered.displaced
        if displaced is not None:
            _LOG.warning(
                "blocks cache %d takes over the key %s of blocks cache %d; peers that pull by it now read cache %d",
                record.cache_id, key_of(record.keys[0][0], self._state.cluster_id), displaced.cache_id, record.cache_id,
            )  # fmt: skip
        return Cache(
            record.cache_id, record.desc, record.addresses.tolist(), record.is_blocks, self._state.life
        )

    def _take_back(self, entered: Entered) -> None:
        """Nobody got the handle: the cache goes, and the key that it took over finds what it found before."""
        state, displaced = self._state, entered.displaced
        with state.lock:
            told = self.take_out(entered.record.cache_id) or []
            if displaced is not None and state.registry.bind_again(displaced):
                told += self.announce(displaced)
        flush(told)
        self._end_use(entered.record.cache_id, time.monotonic(), _never)

    def unregister(self, cache_id: int, call: Call) -> None:
        """Takes a cache out and waits until nobody uses it, at most sync_kv_timeout; then cuts off."""
        state = self._state
        deadline = time.monotonic() + state.timeout_s
        call.on_cut(state.condition.notify_all)
        with state.lock:
            state.check_open()
            told = self.take_out(cache_id)
        if told is None:
            return
        flush(told)
        self._end_use(cache_id, deadline, lambda: call.dropped)

    def _end_use(self, cache_id: int, deadline: float, gone: Callable[[], bool]) -> None:
        """Waits for those who use a cache until the deadline, or until nobody waits for that; then cuts off."""
        state = self._state
        if self._wait_unused(cache_id, deadline, gone) or self._cut_off(cache_id):
            self._free(cache_id)
            return
        _LOG.warning("cache %d is still in use %g s after it was cut off", cache_id, LAST_BYTES_S)
        state.workers.submit(("free", cache_id), lambda: self.free_when_unused(cache_id))

    def take_out(self, cache_id: int) -> list[Link] | None:
        """From now on nothing new finds a cache. The caller holds the lock.

        Returns:
            The links to flush; None: there is no such cache.
        """
        record = self._state.registry.remove(cache_id)
        if record is None:
            return None
        self._state.clear_word(record.word)
        self._state.forget_routes(cache_id)
        return self._withdraw(record)

    def free_when_unused(self, cache_id: int) -> None:
        """Gives memory back once those who hold a lease have finished. For a worker."""
        self._wait_unused(cache_id, math.inf, _never)
        self._free(cache_id)

    def _settle_readers(self, cache_id: int) -> None:
        """Reads that nobody here sees, by an engine that does not forgive memory that goes, are to end now.

        They fail in any case: the words that they look at last are cleared.
        """
        state = self._state
        if not state.regions.has(cache_id):
            return
        readers = [link for link in state.links.links() if state.is_read_registered(link)]
        left = settle(readers, time.monotonic() + _SETTLE_S, cache_id)
        now = time.monotonic()
        lost_at = now if any(link.down_reason for link in readers) else state.reader_lost_at
        with state.lock:  # those that cannot be asked any more
            state.condition.wait_for(lambda: state.closed is not None, max(0.0, lost_at + _LOST_S - now))
        if left:
            _LOG.warning(
                "cache %d is given back although %s may still be reading it; keep its memory mapped until that link "
                "has ended", cache_id, ", ".join(describe(link) for link in left),
            )  # fmt: skip

    def _free(self, cache_id: int) -> None:
        self._settle_readers(cache_id)
        with self._state.lock:
            self._state.pools.free(cache_id)
        self._state.regions.free(cache_id)

    def is_unused(self, cache_id: int) -> bool:
        """Whether no lease and no transfer of ours holds a cache. The caller holds the lock."""
        state = self._state
        state.leases.expire(time.monotonic())
        leased = state.leases.of_cache(cache_id)
        return not leased and not state.flights.where(lambda f: cache_id in f.cache_ids)

    def _cut_off(self, cache_id: int) -> bool:
        state = self._state
        error = CacheNotExistError(
            f"cache {cache_id} was unregistered and the {state.timeout_s:g} s for transfers are over"
        )
        state.flights.cut(lambda f: cache_id in f.cache_ids, error)
        with state.lock:
            for lease in state.leases.of_cache(cache_id):
                state.leases.end(lease)
        return self._wait_unused(cache_id, time.monotonic() + LAST_BYTES_S, _never)

    def _wait_unused(self, cache_id: int, deadline: float, gone: Callable[[], bool]) -> bool:
        state = self._state
        with state.lock:
            while not self.is_unused(cache_id):
                now = time.monotonic()
                if now >= deadline or gone():
                    return False
                ends = [
                    deadline,
                    now + _LONGEST_WAIT_S,
                    *(x.expires_at for x in state.leases.of_cache(cache_id)),
                ]
                state.condition.wait(max(0.0, min(ends) - now))
            return True

    # ---- memory that was mapped anew -----------------------------------------------------------------------

    def remap(self, ranges: Sequence[MemInfo]) -> None:
        """Checks the caches in these ranges again and gives each a new generation; old readers notice.

        Raises:
            ParamInvalidError: A range, or a cache in one, is not device memory that is mapped. Nothing changes.
        """
        state = self._state
        starts, ends = checked_ranges(ranges)
        with state.lock:
            state.check_open()
            records = [r for r in state.registry.records() if r.touches(starts, ends)]
        for record in records:
            check_mapped(f"cache {record.cache_id}: tensor", record.addresses, record.layout)
        told: list[Link] = []
        renewed: set[int] = set()
        with state.lock:
            state.check_open()
            for record in records:
                if state.registry.get(record.cache_id) is record:
                    told += self._renew(record)
                    renewed.add(record.cache_id)
        flush(told)
        error = CacheNotExistError("its memory was mapped anew while it was read (remap_registered_memory)")
        state.flights.cut(lambda f: f.serving and not renewed.isdisjoint(f.cache_ids), error)
        for cache_id in renewed:
            self._register_again(cache_id)

    def _renew(self, record: Record) -> list[Link]:
        state = self._state
        fresh = replace(record, word=state.new_word())
        state.registry.replace(fresh)
        state.clear_word(record.word)
        state.forget_routes(record.cache_id)
        for lease in state.leases.of_cache(record.cache_id):
            state.leases.end(lease)
        state.condition.notify_all()
        return self.announce(fresh)

    def _register_again(self, cache_id: int) -> None:
        """For transports that need registration; old readers have noticed, so that none meets the gap."""
        state = self._state
        with state.lock:
            record = state.registry.get(cache_id)
            if record is None or state.pools.has(cache_id):
                return
        self._settle_readers(cache_id)
        if state.regions.renew(cache_id, record.addresses, record.layout.tensor_nbytes):
            with state.lock:
                for link in state.by_token.values():  # with the old token
                    peer_of(link).published.drop(cache_id)
                told = self.announce(record) if state.registry.get(cache_id) is record else []
            flush(told)

    # ---- what there is ---------------------------------------------------------------------------------------

    def infos(self) -> list[CacheInfo]:
        """All caches, in order of their ids. Changes nothing: it is done in the caller's thread."""
        state, now = self._state, time.monotonic()
        with state.lock:
            state.check_open()
            return [self._info(record, now) for record in state.registry.records()]

    def _info(self, record: Record, now: float) -> CacheInfo:
        state = self._state
        return CacheInfo(
            cache_id=record.cache_id,
            kind="blocks" if record.is_blocks else "cache",
            desc=record.desc,  # not a copy: two looks at one cache are equal
            keys=tuple(key_of(name, state.cluster_id) for name, _ in state.registry.names_of(record)),
            remote_accessible=record.remote_accessible,
            allocated=state.pools.has(record.cache_id),
            leases=sum(lease.expires_at > now for lease in state.leases.of_cache(record.cache_id)),
        )

    # ---- mode B: what peers know ------------------------------------------------------------------------

    def announce_all(self, link: Link, records: Sequence[Record]) -> None:
        """Posts our table to a new link, which hears of all that changes by now: the lock is held for one at a time."""
        state = self._state
        for record in records:
            with state.lock:
                is_there = state.registry.get(record.cache_id) is record and not state.draining
                if is_there and record.remote_accessible and not self._post(link, record):
                    return

    def announce(self, record: Record) -> list[Link]:
        """Posts a cache that is new or has other keys now; returns the links to flush. The caller holds the lock."""
        if not self._state.accessible or self._state.draining or not record.remote_accessible:
            return []
        return [link for link in self._state.by_token.values() if self._post(link, record)]

    def _post(self, link: Link, record: Record) -> bool:
        """Posts one cache, its keys in portions: a frame has a limit, a cache may have any number of slots."""
        bindings = self._state.registry.bindings_of(record)
        try:
            for at in range(0, max(1, len(bindings)), limits.KEYS):
                entry, addresses = self._state.shown_to(link, record, bindings[at : at + limits.KEYS])
                link.post(Announce(entry=entry, more_keys=at > 0), [addresses])
        except LinkLost:
            return False
        return True

    def withdraw_all(self) -> list[Link]:
        """Posts that our table is empty; returns the links to flush. The caller holds the lock."""
        return self._withdraw(*self._state.registry.records())

    def _withdraw(self, *records: Record) -> list[Link]:
        state = self._state
        known = [r.cache_id for r in records if state.accessible and r.remote_accessible]
        told = []
        for link in state.by_token.values():
            published = peer_of(link).published
            gone = {*known, *(r.cache_id for r in records if published.drop(r.cache_id))}
            try:
                if gone:
                    ids = tuple(gone)
                    for at in range(0, len(ids), limits.CACHE_IDS):
                        link.post(Withdraw(cache_ids=ids[at : at + limits.CACHE_IDS]))
                    told.append(link)
            except LinkLost:
                continue
        return told


def _never() -> bool:
    return False


def flush(links: list[Link]) -> None:
    """Sends what was posted under the lock."""
    for link in links:
        link.flush()
