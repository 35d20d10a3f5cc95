"""Plans of bytes against plain lists: whatever the cuts, the stream is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._core.segments import U64, Extents, Segments

Run = tuple[int, int]

_runs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8)
_bases = st.lists(st.integers(0, 3).map(lambda n: n * 1000), max_size=4)
_steps = st.tuples(st.integers(1, 30), st.integers(1, 6))


def extents(bases: list[int], runs: list[Run]) -> Extents:
    table = np.array(runs, dtype=np.uint64).reshape(-1, 2)
    return Extents.of(np.array(bases, dtype=np.uint64), table[:, 0], table[:, 1])


def stream(bases: list[int], runs: list[Run]) -> list[int]:
    """The address of every byte, in order: the definition."""
    return [base + offset + i for base in bases for offset, n in runs for i in range(n)]


def spelled(addresses: U64, lengths: U64) -> list[int]:
    return [a + i for a, n in zip(addresses.tolist(), lengths.tolist(), strict=True) for i in range(n)]


@given(_bases, _runs)
def test_size_and_merging(bases: list[int], runs: list[Run]) -> None:
    found = extents(bases, runs)
    assert found.nbytes == len(stream(bases, runs))
    assert found.lengths.all()
    assert not np.any(found.offsets[1:] == found.offsets[:-1] + found.lengths[:-1])
    assert np.array_equal(found.ends, np.cumsum(found.lengths))


@given(_bases, _runs, st.lists(_steps, min_size=1, max_size=5))
def test_takes_of_any_size_spell_the_stream(bases: list[int], runs: list[Run], steps: list[Run]) -> None:
    found, expected, at, turn = extents(bases, runs), stream(bases, runs), 0, 0
    while at < len(expected):
        max_nbytes, max_runs = steps[turn % len(steps)]
        addresses, lengths, nbytes = found.take(at, max_nbytes, max_runs)
        pairs, same = found.take_pairs(at, max_nbytes, max_runs)
        assert pairs.flags.c_contiguous and np.array_equal(pairs, np.stack((addresses, lengths), axis=1))
        assert 0 < nbytes == same <= max_nbytes and 0 < len(addresses) <= max_runs and lengths.all()
        assert spelled(addresses, lengths) == expected[at : at + nbytes]
        if nbytes < min(max_nbytes, len(expected) - at):
            assert len(addresses) == max_runs, "a take ends early only for want of runs"
        at, turn = at + nbytes, turn + 1
    assert found.take(at, 5, 5)[2] == 0 and len(found.take(at, 5, 5)[0]) == 0


@given(_bases, _runs, st.integers(0, 300))
def test_one_take_of_everything_from_anywhere(bases: list[int], runs: list[Run], start: int) -> None:
    addresses, lengths, nbytes = extents(bases, runs).take(start, 1 << 62, 1 << 40)
    expected = stream(bases, runs)[start:]
    assert spelled(addresses, lengths) == expected and nbytes == len(expected)


@given(_bases, _runs, st.integers(1, 7))
def test_expansion_matches_the_two_streams_byte_by_byte(
    bases: list[int], runs: list[Run], max_runs: int
) -> None:
    total = len(stream(bases, runs))
    there = [(3 * i, 2) for i in range(total // 2)] + [(7000, total % 2)]
    plan = Segments(extents([50_000], there), extents(bases, runs))
    got_src: list[int] = []
    got_dst: list[int] = []
    for src, dst, nbytes in plan.expand(max_runs):
        assert 0 < len(src) == len(dst) == len(nbytes) <= max_runs and nbytes.all()
        got_src += spelled(src, nbytes)
        got_dst += spelled(dst, nbytes)
    assert got_src == stream([50_000], there)
    assert got_dst == stream(bases, runs)


def test_streams_beyond_float_precision() -> None:
    """2**53 + 1 is the first integer that a float64 cannot hold."""
    far = (1 << 53) + 1
    found = extents([0], [(0, far), (1 << 60, far)])
    addresses, lengths, nbytes = found.take(far - 1, 3, 10)
    assert (addresses.tolist(), lengths.tolist(), nbytes) == ([far - 1, 1 << 60], [1, 2], 3)
    assert found.take(far, 1, 1)[0].tolist() == [1 << 60]


def test_high_addresses_do_not_wrap() -> None:
    base = (1 << 64) - 4096
    assert extents([base], [(4000, 96)]).take(10, 100, 5)[0].tolist() == [base + 4010]


@pytest.mark.parametrize("runs", [1, 3, 1023, 1024, 1025, 5000])
def test_many_rows_in_batches_of_1024(runs: int) -> None:
    rows = max(3, 4000 // runs)
    bases = [i << 40 for i in range(rows)]
    table = [(7 * i, 5) for i in range(runs)]
    found, at, seen = extents(bases, table), 0, []
    while at < found.nbytes:
        addresses, lengths, nbytes = found.take(at, 1 << 30, 1024)
        assert nbytes == 5 * len(addresses) and (lengths == 5).all()
        seen += addresses.tolist()
        at += nbytes
    assert seen == [base + offset for base in bases for offset, _ in table]


def test_equality_is_by_value() -> None:
    one = extents([1, 2], [(0, 4), (9, 1)])
    assert one == extents([1, 2], [(0, 2), (2, 2), (9, 1)])
    assert one != extents([1, 2], [(0, 4), (9, 2)])
    assert one != extents([1], [(0, 4), (9, 1)])
    assert one != "something else"


def test_a_selector_has_no_pairs() -> None:
    with pytest.raises(TypeError, match="selector"):
        next(Segments(b"name", extents([0], [(0, 1)])).expand(4))
