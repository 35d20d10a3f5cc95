"""Ranges against a plain model, and the book's promise to NIXL."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.testing.board import extents
from llm_datadist.transports.nixl_ranges import Book, Ranges, none, spans

Pairs = list[tuple[int, int]]
pairs = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=12
)


def table(rows: Pairs) -> np.ndarray:
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


@given(pairs, pairs)
def test_ranges_equal_a_plain_model(rows: Pairs, wanted: Pairs) -> None:
    ranges, asked = Ranges(table(rows)), table(wanted)
    for i, (start, end) in enumerate(wanted):
        holders = [r for r in rows if r[0] <= start and end <= r[1]]
        at = int(ranges.find(asked)[i])
        assert (at >= 0) == bool(holders)
        if holders:
            found = tuple(ranges.pairs[at].tolist())
            assert found in holders and found[1] == max(r[1] for r in rows if r[0] <= start)
        assert ranges.touch(asked)[i] == any(r[0] < end and start < r[1] for r in rows)
        assert ranges.exact(asked)[i] == ((start, end) in rows)
    assert ranges.hold(asked) == all(any(r[0] <= s and e <= r[1] for r in rows) for s, e in wanted)
    overlapped = any(r != w and r[0] < w[1] and w[0] < r[1] for r in rows for w in wanted if w not in rows)
    assert ranges.clash(asked) == overlapped
    assert sorted(map(tuple, ranges.without(asked).pairs.tolist())) == sorted(
        r for r in rows if r not in wanted
    )


@given(st.lists(pairs, max_size=8), st.data())
def test_the_book_holds_what_is_registered_and_no_more(calls: list[Pairs], data: st.DataObject) -> None:
    """Each registration stays held by the rows that it was given, until its end; then all rows are gone."""
    book = Book()
    live: list[tuple[Pairs, np.ndarray]] = []
    for wanted in calls:
        used, new = book.plan(table(wanted))
        assert not book.ranges.exact(new).any()
        book.add(used, new)
        live.append((wanted, used))
        if data.draw(st.booleans()):
            _, over = live.pop(data.draw(st.integers(0, len(live) - 1)))
            book.remove(over)
        for asked, rows in live:
            assert book.ranges.exact(rows).all()
            assert Ranges(rows).hold(table(asked))
            assert book.ranges.hold(table(asked))
            widest = book.ranges.pairs[np.unique(book.ranges.find(table(asked)))]
            assert (widest[1:, 0] >= widest[:-1, 1]).all(), "NIXL must not see two that overlap"
    for _, rows in live:
        book.remove(rows)
    assert not len(book.ranges.pairs)


def test_spans() -> None:
    assert spans(extents([1 << 63], [(8, 8), (100, 20)])).tolist() == [[(1 << 63) + 8, (1 << 63) + 120]]
    assert spans(extents([7], [])).tolist() == none().tolist()
    for bases, runs in (
        ([8], [(0, 100), ((1 << 64) - 4, 8)]),
        ([8], [((1 << 64) - 1, 8)]),
        ([1 << 63], [(1 << 63, 8)]),
        ([(1 << 64) - 4], [(0, 8)]),
    ):
        assert spans(extents(bases, runs)) is None
