"""The page allocator against a model that keeps the owner of every page."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist._core.pool import PagePool

pytestmark = pytest.mark.rule("6.68", "6.69", "6.70")

PAGES = 24


def runs(owners: list[int]) -> list[tuple[int, int]]:
    """(length, start) of every free run."""
    found, start = [], None
    for page, owner in enumerate([*owners, -1]):
        if owner == 0 and start is None:
            start = page
        elif owner and start is not None:
            found.append((page - start, start))
            start = None
    return found


class PoolMachine(RuleBasedStateMachine):
    """§6 Pools: best fit, neighbours merge, all or nothing, the whole pool is usable."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.owners = [0] * PAGES
        self.out: dict[int, tuple[list[int], list[int]]] = {}
        self.number = 0

    @rule(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def allocate(self, sizes: list[int]) -> None:
        self.number += 1
        owners, starts = list(self.owners), []
        for size in sizes:
            fitting = [run for run in runs(owners) if run[0] >= size]
            if not fitting:
                assert self.pool.allocate(sizes) is None
                return
            start = min(fitting)[1]
            owners[start : start + size] = [self.number] * size
            starts.append(start)
        assert self.pool.allocate(sizes) == starts
        self.owners, self.out[self.number] = owners, (starts, sizes)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        self.pool.free(*self.out.pop(number))
        self.owners = [0 if owner == number else owner for owner in self.owners]

    @invariant()
    def what_is_free_agrees(self) -> None:
        assert self.pool.free_pages == self.owners.count(0)
        assert self.pool.largest_free_pages == max(runs(self.owners), default=(0, 0))[0]

    def teardown(self) -> None:
        for starts, sizes in self.out.values():
            self.pool.free(starts, sizes)
        assert self.pool.allocate([PAGES]) == [0]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=120, stateful_step_count=30)


@pytest.mark.parametrize("sizes", [[PAGES + 1], [PAGES, 1], [PAGES // 2] * 3])
def test_what_does_not_fit_takes_nothing(sizes: list[int]) -> None:
    pool = PagePool(PAGES)
    assert pool.allocate(sizes) is None
    assert (pool.free_pages, pool.largest_free_pages) == (PAGES, PAGES)
