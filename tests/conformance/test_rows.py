"""Repeated reads of one unit of each tensor keep the promises of the seam, over each transport that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from llm_datadist.testing.rows import RowsConformance
from tests.support.local_pair import LocalPair
from tests.support.shm_pair import ShmPair

Make = Callable[[], LocalPair | ShmPair]
PAIRS: list[Make] = [lambda: LocalPair(1), lambda: ShmPair(1)]


@pytest.fixture(scope="module", params=PAIRS, ids=["local", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[LocalPair | ShmPair]:
    with closing(request.param()) as pair:
        yield pair


@pytest.fixture(params=PAIRS, ids=["local", "shm"])
def doomed(request: pytest.FixtureRequest) -> Iterator[LocalPair | ShmPair]:
    with closing(request.param()) as pair:
        yield pair


class TestRows(RowsConformance):
    pass
