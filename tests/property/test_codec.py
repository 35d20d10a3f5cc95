"""Core values to the wire and back unchanged; whatever else a peer sends is a ProtocolError and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist._engine import codec
from llm_datadist._wire.framing import Frame, ProtocolError
from llm_datadist._wire.messages import CacheEntry, Found, KeyRef, ReadRequest, Word
from llm_datadist.caches import CacheDesc
from llm_datadist.data_type import DataType

uint64 = st.integers(0, 2**64 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
words = st.builds(GenerationWord, uint64, uint64)
slot_names = st.builds(KeyName, st.sampled_from(["req", "prefix", "blocks"]), uint64, uint64)
any_number = st.one_of(st.integers(-2, 9), st.integers(-(2**63), 2**64 - 1))


@given(
    st.one_of(slot_names, st.builds(KeyName, st.just("cache"), int64, st.just(0))), st.integers(0, 2**32 - 1)
)
def test_key_names(name: KeyName, batch: int) -> None:
    """A cache id of the interface is an int64, so -1 must reach the peer and be a miss there."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(codec.key_ref(name, batch)), type=KeyRef)
    assert codec.key_name(sent) == name
    assert sent.batch_index == batch


@given(words)
def test_words(word: GenerationWord) -> None:
    assert codec.word_of(codec.word_message(word)) == word


@given(
    st.integers(1, 2**63 - 1),
    st.integers(1, 9),
    st.integers(1, 2**31),
    st.integers(1, 2**31),
    st.booleans(),
    words,
    st.lists(st.tuples(slot_names, st.integers(0, 9), words), max_size=3, unique_by=lambda b: b[0]),
    st.booleans(),
)
def test_cache_entries(
    cache_id: int,
    tensors: int,
    dim0: int,
    stride: int,
    is_blocks: bool,
    word: GenerationWord,
    bindings: Any,
    shown: bool,
) -> None:
    layout = Layout(tensors, dim0, stride)
    bases = np.arange(1, tensors + 1, dtype=np.uint64) << np.uint64(40)
    desc = CacheDesc(tensors, [dim0, stride], DataType.DT_INT8)
    record = Record(cache_id, desc, layout, bases, is_blocks, True, word, ())
    entry = msgspec.msgpack.encode(codec.entry_of(record, bindings))
    sent = msgspec.msgpack.decode(entry, type=CacheEntry)
    cache = codec.remote_cache(sent, codec.raw(bases) if shown else b"", by_address=shown)
    assert (cache.cache_id, cache.layout, cache.is_blocks, cache.word) == (cache_id, layout, is_blocks, word)
    assert cache.addresses.tolist() == (bases.tolist() if shown else [])
    assert cache.keys == tuple((name, batch) for name, batch, _ in bindings)
    assert [cache.word_for(name) for name, _, _ in bindings] == [own for _, _, own in bindings]
    assert cache.word_for(KeyName("cache", cache_id, 0)) == word


@given(st.one_of(st.none(), st.builds(range, st.integers(0, 2**62), st.integers(0, 2**62))))
def test_layer_ranges(layers: range | None) -> None:
    """An empty range means all tensors, as None does."""
    back = codec.layers_of(codec.layers_pair(layers))
    assert back == (layers or None)


@given(st.lists(uint64))
def test_arrays(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    sent = codec.raw(array)
    assert bytes(sent) == b"".join(v.to_bytes(8, "little") for v in values)
    assert codec.u64(sent).tolist() == values


parts = st.builds(
    CacheSlice,
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.lists(st.one_of(st.integers(0, 9), uint64), max_size=5).map(lambda b: np.array(b, dtype=np.uint64)),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
leases = st.one_of(st.none(), st.tuples(st.integers(1, 2**63), words))


@given(parts, st.integers(1, 2**63 - 1), words, leases)
def test_selectors(part: CacheSlice, cache_id: int, word: GenerationWord, lease: Any) -> None:
    data = codec.selector(part, cache_id, word, lease)
    request, back = codec.read_selector(data)
    assert (request.cache_id, request.generation) == (cache_id, word.value)
    assert (request.lease_id, request.lease_value) == ((lease[0], lease[1].value) if lease else (0, 0))
    for field in ("first_tensor", "tensor_count", "unit_nbytes", "row_nbytes"):
        assert getattr(back, field) == getattr(part, field)
    assert back.indices.dtype == np.uint64
    assert back.indices.tolist() == part.indices.tolist()


def test_small_indices_cross_in_four_bytes() -> None:
    wide, narrow = (CacheSlice(0, 1, np.full(1000, i, np.uint64), 8, 8) for i in (2**32, 2**32 - 1))
    sizes = [len(codec.selector(p, 1, GenerationWord(0, 1), None)) for p in (wide, narrow)]
    assert sizes[0] - sizes[1] == 4000


GOOD = codec.selector(CacheSlice(1, 2, np.array([3, 4], np.uint64), 8, 16), 5, GenerationWord(0, 77), None)


@given(st.one_of(st.binary(max_size=120), st.builds(lambda cut: GOOD[:cut], st.integers(0, len(GOOD) - 1))))
@settings(max_examples=200)
def test_selectors_of_noise_and_cut_ones(data: bytes) -> None:
    _reads_or_breaks_the_protocol(data)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=400)
def test_selectors_with_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    _reads_or_breaks_the_protocol(bytes(data))


def _reads_or_breaks_the_protocol(data: bytes) -> None:
    try:
        request, part = codec.read_selector(data)
    except ProtocolError:
        return
    assert request.index_nbytes in (4, 8)
    assert min(part.first_tensor, part.tensor_count, part.unit_nbytes, part.row_nbytes) >= 0


@given(st.integers(0, len(GOOD) - 1))
def test_a_cut_selector_is_refused_or_has_fewer_indices(cut: int) -> None:
    head = 4 + int.from_bytes(GOOD[:4], "little")
    if cut >= head and (cut - head) % 4 == 0:
        assert codec.read_selector(GOOD[:cut])[1].indices.tolist() == [3, 4][: (cut - head) // 4]
        return
    with pytest.raises(ProtocolError):
        codec.read_selector(GOOD[:cut])


def _selector_of(**fields: Any) -> bytes:
    numbers: dict[str, Any] = {
        "cache_id": 1, "generation": 1, "first_tensor": 0, "tensor_count": 1, "unit_nbytes": 8, "row_nbytes": 8,
    }  # fmt: skip
    head = msgspec.msgpack.encode(ReadRequest(**{**numbers, **fields}))
    return len(head).to_bytes(4, "little") + head


@pytest.mark.parametrize("field", ["first_tensor", "tensor_count", "unit_nbytes", "row_nbytes"])
@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1])
def test_numbers_of_a_selector_have_limits(field: str, value: int) -> None:
    with pytest.raises(ProtocolError, match="selector"):
        codec.read_selector(_selector_of(**{field: value}))


@pytest.mark.parametrize("fields", [{"index_nbytes": n} for n in (0, 1, -4, 16)])
def test_indices_have_four_or_eight_bytes(fields: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        codec.read_selector(_selector_of(**fields) + bytes(16))


def test_nesting_without_end_is_refused() -> None:
    head = b"\x81\xa1a" + b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        codec.read_selector(len(head).to_bytes(4, "little") + head)


def test_a_head_longer_than_the_selector_is_refused() -> None:
    good = _selector_of()
    longer = (len(good) - 4 + 8).to_bytes(4, "little") + good[4:]
    with pytest.raises(ProtocolError, match="claims"):
        codec.read_selector(longer)


key_refs = st.builds(
    KeyRef,
    kind=st.sampled_from(["req", "prefix", "blocks", "cache", "", "REQ"]),
    id=any_number,
    model_id=any_number,
    batch_index=any_number,
)
entries = st.builds(
    CacheEntry,
    cache_id=any_number,
    is_blocks=st.booleans(),
    num_tensors=any_number,
    dim0=any_number,
    stride_nbytes=any_number,
    word=st.builds(Word, address=any_number, value=any_number),
    keys=st.lists(key_refs, max_size=2).map(tuple),
)


@given(entries, st.binary(max_size=40), st.booleans())
@settings(max_examples=400)
def test_entries_of_a_peer(entry: CacheEntry, addresses: bytes, by_address: bool) -> None:
    try:
        cache = codec.remote_cache(entry, addresses, by_address=by_address)
    except ProtocolError:
        return
    layout = cache.layout
    assert min(layout.num_tensors, layout.dim0, layout.stride_nbytes, cache.cache_id) > 0
    assert layout.num_tensors < 2**32
    assert layout.tensor_nbytes < 2**63
    assert len(cache.addresses) == layout.num_tensors or (not by_address and not len(cache.addresses))
    assert all(0 <= n < 2**64 for n in cache.word)
    assert all(0 <= b < 2**64 for _, b in cache.keys)


ENTRY: dict[str, Any] = {
    "cache_id": 1, "is_blocks": False, "num_tensors": 2, "dim0": 3, "stride_nbytes": 4,
    "word": Word(address=8, value=9),
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {name: value}
            for name in ("cache_id", "num_tensors", "dim0", "stride_nbytes")
            for value in (0, -1, 2**63)
        ),
        {"num_tensors": 2**32},
        {"dim0": 2**32, "stride_nbytes": 2**31},
        {"word": Word(address=-1)},
        {"word": Word(value=-1)},
        {"keys": (KeyRef(kind="cat"),)},
        {"keys": (KeyRef(kind="req", id=-1),)},
        {"keys": (KeyRef(kind="req", model_id=-1),)},
        {"keys": (KeyRef(kind="req", batch_index=-1),)},
        {"keys": (KeyRef(kind="cache", id=2**63),)},
    ],
    ids=repr,
)
def test_each_number_of_an_entry_has_its_limit(fields: dict[str, Any]) -> None:
    codec.remote_cache(CacheEntry(**ENTRY), bytes(16), by_address=True)
    with pytest.raises(ProtocolError):
        codec.remote_cache(CacheEntry(**{**ENTRY, **fields}), b"", by_address=False)


@pytest.mark.parametrize(
    ("nbytes", "by_address"), [(n, b) for n in (1, 7, 8, 15, 24) for b in (0, 1)] + [(0, 1)]
)
def test_an_entry_has_an_address_for_each_tensor_or_none(nbytes: int, by_address: int) -> None:
    with pytest.raises(ProtocolError):
        codec.remote_cache(CacheEntry(**ENTRY), bytes(nbytes), by_address=bool(by_address))


@pytest.mark.parametrize("pair", [(-1, 2), (0, 2**63), (0, -1)])
def test_layer_ranges_of_a_peer_have_limits(pair: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        codec.layers_of(pair)


def test_a_missing_attachment_is_a_breach() -> None:
    frame = Frame(Found(id=1, entry=CacheEntry(**ENTRY)), (b"x",))
    assert codec.attachment(frame, 0) == b"x"
    with pytest.raises(ProtocolError, match="2 needed"):
        codec.attachment(frame, 1)
