"""Between core values and wire messages. Every number from a peer is held to its limit here.

Raises ProtocolError for what a well-behaved peer never sends; the control plane closes that connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from llm_datadist._core import limits
from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.segments import U64
from llm_datadist._wire.framing import Buffer, Frame, ProtocolError
from llm_datadist._wire.messages import CacheEntry, KeyRef, Offer, ReadRequest, Word

_UNIT_NBYTES = 4
UNITS = 1 << 8 * _UNIT_NBYTES  # that four bytes can name
_UINT32 = 1 << 32
_INT64 = 1 << 63
_UINT64 = 1 << 64
_KINDS = frozenset({"req", "prefix", "blocks", "cache"})
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(ReadRequest)
_OFFER_NBYTES = 4096  # the objects of one
_LENGTH_NBYTES = 4  # of the struct at the head of a selector
_INDEX_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<u8")}  # by ``index_nbytes``


def key_ref(name: KeyName, batch_index: int = 0, word: GenerationWord | None = None) -> KeyRef:
    """A key name on the wire."""
    return KeyRef(
        kind=name.kind,
        id=name.id,
        model_id=name.model_id,
        batch_index=batch_index,
        word=word_message(word) if word else None,
    )


def key_name(ref: KeyRef) -> KeyName:
    """A key name from the wire."""
    if ref.kind not in _KINDS:
        raise ProtocolError(f"key of unknown kind {ref.kind!r}")
    # A cache id is int64: one that no cache has, such as -1, is a miss and no breach.
    shift = _INT64 if ref.kind == "cache" else 0
    _within("key", _UINT64, ref.id + shift, ref.model_id, ref.batch_index)
    return KeyName(ref.kind, ref.id, ref.model_id)


def word_message(word: GenerationWord) -> Word:
    """A word on the wire."""
    return Word(address=word.address, value=word.value)


def word_of(word: Word) -> GenerationWord:
    """A word from the wire."""
    _within("word", _UINT64, word.address, word.value)
    return GenerationWord(word.address, word.value)


def entry_of(
    record: Record, bindings: Iterable[tuple[KeyName, int, GenerationWord]] = (), token: bytes = b""
) -> CacheEntry:
    """A cache of ours as a peer sees it, with the keys that find it (``Registry.bindings_of``)."""
    return CacheEntry(
        cache_id=record.cache_id,
        is_blocks=record.is_blocks,
        num_tensors=record.layout.num_tensors,
        dim0=record.layout.dim0,
        stride_nbytes=record.layout.stride_nbytes,
        word=word_message(record.word),
        keys=tuple(key_ref(*binding) for binding in bindings),
        token=token,
    )


def remote_cache(entry: CacheEntry, addresses: Buffer, *, by_address: bool) -> RemoteCache:
    """A peer's cache; ``by_address``: we read it so, and need the address of each tensor."""
    layout = layout_of(entry)
    bases = u64(addresses)
    if len(bases) != layout.num_tensors and (by_address or len(bases)):
        raise ProtocolError(f"{len(bases)} addresses for a cache of {layout.num_tensors} tensors")
    keys = tuple((key_name(k), k.batch_index) for k in entry.keys)
    words = {key_name(k): word_of(k.word) for k in entry.keys if k.word is not None}
    return RemoteCache(
        entry.cache_id, layout, entry.is_blocks, word_of(entry.word), bases, keys, words, entry.token
    )


def published_nbytes(entry: CacheEntry, addresses: Buffer) -> int:
    """What a published cache counts; the same for both sides."""
    return len(addresses) + len(entry.token)


def layout_of(entry: CacheEntry) -> Layout:
    """The sizes of a peer's cache."""
    if not (0 < entry.num_tensors < _UINT32 and 0 < entry.dim0 < _INT64 and 0 < entry.stride_nbytes < _INT64):
        raise ProtocolError(
            f"cache of {entry.num_tensors} tensors, {entry.dim0} x {entry.stride_nbytes} bytes"
        )
    if entry.dim0 * entry.stride_nbytes >= _INT64 or not 0 < entry.cache_id < _INT64:
        raise ProtocolError(f"cache {entry.cache_id} of {entry.dim0} x {entry.stride_nbytes} bytes")
    return Layout(entry.num_tensors, entry.dim0, entry.stride_nbytes)


def offer_nbytes(frame: Frame, offer: Offer, source: RemoteCache) -> int:
    """What keeping an offer takes, about."""
    lists = sum(len(attachment(frame, at)) for at in range(3))
    notice = sum(map(len, offer.notify or ()))
    return lists + notice + source.addresses.nbytes + len(source.token) + _OFFER_NBYTES


def check_offer(offer: Offer) -> None:
    """What no peer of ours says is a breach of the protocol here, and no failure of the work later."""
    if offer.part_tensors < 1 or offer.kind not in ("cache", "blocks", "layers"):
        raise ProtocolError(f"offer of kind {offer.kind!r} with parts of {offer.part_tensors} tensors")
    for layers in (offer.src_layers, offer.dst_layers):
        layers_of(layers)
    if offer.target is not None:
        key_name(offer.target)


def emptied(offer: Offer, source: RemoteCache) -> tuple[Frame, Offer, RemoteCache]:
    """What is kept of an offer for which there is no room: enough to refuse its parts."""
    rest = msgspec.structs.replace(offer, notify=None)
    return Frame(rest, (b"", b"", b"")), rest, msgspec.structs.replace(source, addresses=u64(b""), token=b"")


def layers_of(pair: tuple[int, int] | None) -> range | None:
    """A layer range from the wire."""
    if pair is None:
        return None
    _within("layer range", _INT64, *pair)
    return range(*pair)


def layers_pair(layers: range | None) -> tuple[int, int] | None:
    """A layer range on the wire; an empty one means all, as None does."""
    return (layers.start, layers.stop) if layers is not None and len(layers) else None


def attachment(frame: Frame, at: int) -> Buffer:
    """An attachment that the message must have."""
    if at >= len(frame.attachments):
        raise ProtocolError(
            f"{type(frame.message).__name__} with {len(frame.attachments)} attachments, {at + 1} needed"
        )
    return frame.attachments[at]


def u64(data: Buffer) -> U64:
    """An attachment as a uint64 array, not to be written to."""
    if len(data) % 8:
        raise ProtocolError(f"array of {len(data)} bytes is not one of uint64")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def raw(array: U64) -> Buffer:
    """A uint64 array as an attachment."""
    return np.ascontiguousarray(array, dtype="<u8").tobytes()


def selector(
    part: CacheSlice,
    cache_id: int,
    word: GenerationWord,
    lease: tuple[int, GenerationWord] | None,
    more: Iterable[tuple[int, GenerationWord]] = (),
) -> bytes:
    """What a peer that serves reads is asked for: the part, and the lease or generation it must still have."""
    count = len(part.indices)
    highest = part.indices.item() if count == 1 else int(part.indices.max()) if count else 0
    index_nbytes = 4 if highest < _UINT32 else 8
    head = _ENCODER.encode(
        ReadRequest(
            cache_id=cache_id,
            generation=word.value,
            lease_id=lease[0] if lease else 0,
            lease_value=lease[1].value if lease else 0,
            more_leases=tuple((lease_id, word.value) for lease_id, word in more),
            first_tensor=part.first_tensor,
            tensor_count=part.tensor_count,
            unit_nbytes=part.unit_nbytes,
            row_nbytes=part.row_nbytes,
            index_nbytes=index_nbytes,
        )
    )
    indices = part.indices.astype(_INDEX_TYPES[index_nbytes])
    return len(head).to_bytes(_LENGTH_NBYTES, "little") + head + indices.tobytes()


def unit_head(first: CacheSlice, cache_id: int, word: GenerationWord) -> bytes:
    """``selector`` without its index: followed by four bytes, little-endian, it names that unit instead of 0."""
    return selector(first, cache_id, word, None)[:-_UNIT_NBYTES]


def is_unit(request: ReadRequest, part: CacheSlice) -> bool:
    """Whether the selector of this request is such a head and a unit."""
    whole = part.row_nbytes == part.unit_nbytes
    return whole and len(part.indices) == 1 and request.index_nbytes == _UNIT_NBYTES


def read_selector(data: bytes) -> tuple[ReadRequest, CacheSlice]:
    """The request in a selector."""
    stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    if stop > min(len(data), _LENGTH_NBYTES + limits.SELECTOR_HEAD_NBYTES):
        raise ProtocolError(f"selector of {len(data)} bytes claims a head of {stop - _LENGTH_NBYTES}")
    try:
        request = _REQUESTS.decode(data[_LENGTH_NBYTES:stop])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as exc:
        raise ProtocolError(f"selector of {len(data)} bytes: {exc}"[:300]) from exc
    index_type = _INDEX_TYPES.get(request.index_nbytes)
    if index_type is None or (len(data) - stop) % request.index_nbytes:
        raise ProtocolError(f"selector with {len(data) - stop} bytes of indices of {request.index_nbytes}")
    numbers = (request.first_tensor, request.tensor_count, request.unit_nbytes, request.row_nbytes)
    _within("selector", _INT64, *numbers)
    indices = np.frombuffer(data, dtype=index_type, offset=stop).astype(np.uint64)
    part = CacheSlice(
        request.first_tensor, request.tensor_count, indices, request.unit_nbytes, request.row_nbytes
    )
    return request, part


def _within(what: str, limit: int, *numbers: int) -> None:
    for number in numbers:
        if not 0 <= number < limit:
            raise ProtocolError(f"{what}: {number} is not in [0, {limit})")
