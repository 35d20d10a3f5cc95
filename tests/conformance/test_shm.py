"""Transport ``shm`` keeps the promises of the seam: by way of the kernel, with movers, and where it may not help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_datadist.testing.one_sided import PartialConformance
from llm_datadist.testing.transports import TransportConformanceSlow
from tests.support.shm_pair import ShmPair

# Threads; whether the kernel may copy; up to which size a destination of no pool is left to it.
WAYS = [(1, True, 16 << 20), (3, True, 0), (1, False, 0)]
NAMES = ["kernel first", "movers", "refused"]


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[ShmPair]:
    with closing(ShmPair(*request.param)) as pair:
        yield pair


@pytest.fixture(params=WAYS, ids=NAMES)
def doomed(request: pytest.FixtureRequest) -> Iterator[ShmPair]:
    with closing(ShmPair(*request.param)) as pair:
        yield pair


class TestShm(PartialConformance):
    pass


@pytest.mark.slow
class TestShmSlow(PartialConformance, TransportConformanceSlow):
    pass
