"""What is published on a link: both sides keep the same, and no more than the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._core import sources
from llm_datadist._core.sources import ENTRY_NBYTES, SOURCES_NBYTES, Sources

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "withdraw"]), st.integers(1, 12), st.integers(0, SOURCES_NBYTES // 3)
    ),
    max_size=60,
)


@given(STEPS)
def test_g16_what_the_owner_takes_for_published_the_reader_has(steps: list[tuple[str, int, int]]) -> None:
    mine: Sources[int] = Sources()
    theirs: Sources[int] = Sources()
    for word, (what, cache_id, nbytes) in enumerate(steps):
        if what == "withdraw":
            assert mine.drop(cache_id) == theirs.drop(cache_id)
            continue
        if mine.use(cache_id) is None:
            theirs.put(cache_id, word, nbytes)
            mine.put(cache_id, word, nbytes)
        assert theirs.use(cache_id) == mine.use(cache_id) is not None
        for side in (mine, theirs):
            assert side.nbytes == sum(size for _, size in side._kept.values())
            assert side.nbytes <= SOURCES_NBYTES or len(side._kept) == 1


def test_g16_what_was_not_used_for_longest_goes_first() -> None:
    kept: Sources[int] = Sources()
    half = SOURCES_NBYTES // 2 - ENTRY_NBYTES
    kept.put(1, 10, half)
    kept.put(2, 20, half)
    assert kept.use(1) == 10
    kept.put(3, 30, half)
    assert kept.use(2) is None and kept.use(1) == 10 and kept.use(3) == 30
    kept.put(4, 40, 2 * sources.SOURCES_NBYTES)
    assert kept.use(4) == 40 and kept.use(1) is kept.use(3) is None
    assert kept.drop(4) and not kept.drop(4) and kept.nbytes == 0
