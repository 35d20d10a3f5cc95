"""Whether two plans of memory meet, against the sets of their bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core.overlap import overlaps
from llm_datadist._core.segments import Extents
from tests.support.streams import addresses_of


def extents(bases: list[int], blocks: list[int], unit: int, tail: int) -> Extents:
    lengths = [unit] * len(blocks)
    if lengths:
        lengths[-1] = tail
    columns = (bases, [b * unit for b in blocks], lengths)
    return Extents.of(*(np.array(c, dtype=np.uint64) for c in columns))


@st.composite
def sides(draw: st.DrawFn, unique: bool) -> Extents:
    unit = draw(st.integers(1, 4))
    bases = draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    blocks = draw(st.lists(st.integers(0, 8), max_size=5, unique=unique))
    return extents(bases, blocks, unit, draw(st.integers(1, unit)))


@given(sides(False), sides(True), st.sampled_from([0, 2**63, 2**64 - 200]))
@settings(max_examples=400)
def test_overlaps(source: Extents, destination: Extents, shift: int) -> None:
    wanted = bool(set(addresses_of(source)) & set(addresses_of(destination)))
    moved = [Extents.of(e.bases + np.uint64(shift), e.offsets, e.lengths) for e in (source, destination)]
    assert overlaps(*moved) == wanted


def test_tensors_that_touch_and_blocks_between_each_other_do_not_overlap() -> None:
    assert not overlaps(extents([0], [0, 2, 4], 8, 8), extents([0], [1, 3, 5], 8, 8))
    assert not overlaps(extents([0], [0], 8, 8), extents([8], [0], 8, 8))
    assert overlaps(extents([0], [0, 2, 4], 8, 8), extents([1], [1, 3, 5], 8, 8))
