"""Short ways of one block between two caches: what a repeated pull of any block of them needs, prepared.

By address: the word, one step that moves the block of all tensors, the word again. Otherwise its owner is
asked, which looks at the word itself.
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np

from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.registry import GenerationWord, Record
from llm_datadist._core.remote_table import Found
from llm_datadist._core.segments import U64, Extents
from llm_datadist._engine import codec
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.routes import ShortWay
from llm_datadist._engine.state import Peer
from llm_datadist._engine.ways import way_for
from llm_datadist._waiting import is_within
from llm_datadist.transports.seam import Fault, OneSidedChannel, Rows, RowsChannel, Units, UnitsChannel


class ByAddress(msgspec.Struct, frozen=True, eq=False):
    """Where the peer's memory is within reach."""

    peer: Peer
    channel: OneSidedChannel
    rows: Rows
    word: GenerationWord
    stride_nbytes: int

    def move(self, flight: Flight, src: int, dst: int, deadline: float) -> bool:
        """See ``ShortWay``."""
        if not self._is_intact(deadline) or flight.error is not None:
            return False
        stride = self.stride_nbytes
        return self.rows.read(
            src * stride, dst * stride, deadline=deadline, on_cut=flight.on_cut
        ) and self._is_intact(deadline)

    def _is_intact(self, deadline: float) -> bool:
        """Whether the word is what it was; False also if that cannot be found out."""
        address, value = self.word
        words = self.peer.words
        found: int | Fault | None = words.peek(address) if words is not None else None
        if found is None:
            found = self.channel.read_word(address, deadline=deadline)
        return found == value


class ByLocking(ByAddress, frozen=True, eq=False):
    """The same, where threads that read take turns."""

    def move(self, flight: Flight, src: int, dst: int, deadline: float) -> bool:
        """See ``ShortWay``."""
        return not is_within() and super().move(flight, src, dst, deadline)


class ByAsking(msgspec.Struct, frozen=True, eq=False):
    """Where the owner sends the block."""

    units: Units
    stride_nbytes: int

    def move(self, flight: Flight, src: int, dst: int, deadline: float) -> bool:
        """See ``ShortWay``."""
        here = dst * self.stride_nbytes
        return not is_within() and self.units.read(src, here, deadline=deadline, on_cut=flight.on_cut)


def short_way(peer: Peer, found: Found, record: Record) -> ShortWay | None:
    """The short way between what a key finds at the peer and a cache of ours; None: there is none."""
    there, here = found.cache.layout, record.layout
    if there.num_tensors != here.num_tensors or there.stride_nbytes != here.stride_nbytes:
        return None
    if not peer.by_address:
        return _by_asking(peer, found, record)
    source, destination = _whole(found.cache.addresses, there), _whole(record.addresses, here)
    way = peer.only_way or way_for(peer.ways, source, found.cache.token, destination)
    if way is None or not way.caps.rows:
        return None
    channel = cast(RowsChannel, way.channel)
    rows = channel.rows(source, destination, here.stride_nbytes)
    kind = ByLocking if way.caps.needs_registration else ByAddress
    return None if rows is None else kind(peer, channel, rows, found.word, here.stride_nbytes)


def _by_asking(peer: Peer, found: Found, record: Record) -> ByAsking | None:
    way, layout = peer.ways[0], found.cache.layout
    stride = layout.stride_nbytes
    if not way.caps.units or layout.dim0 > codec.UNITS:
        return None
    first = CacheSlice(0, layout.num_tensors, np.zeros(1, np.uint64), stride, stride)
    head = codec.unit_head(first, found.cache.cache_id, found.word)
    units = cast(UnitsChannel, way.channel).units(head, record.addresses, stride)
    return None if units is None else ByAsking(units, stride)


def _whole(bases: U64, layout: Layout) -> Extents:
    run = np.array([0, layout.tensor_nbytes], dtype=np.uint64)
    return Extents.of(bases, run[:1], run[1:])
