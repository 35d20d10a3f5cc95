"""Transport ``local`` keeps the promises of the seam, alone and with movers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_datadist.testing.one_sided import OneSidedConformance
from llm_datadist.testing.transports import TransportConformanceSlow
from tests.support.local_pair import LocalPair


@pytest.fixture(scope="module", params=[1, 3], ids=["alone", "movers"])
def pair(request: pytest.FixtureRequest) -> Iterator[LocalPair]:
    with closing(LocalPair(threads=request.param)) as pair:
        yield pair


@pytest.fixture(params=[1, 3], ids=["alone", "movers"])
def doomed(request: pytest.FixtureRequest) -> Iterator[LocalPair]:
    with closing(LocalPair(threads=request.param)) as pair:
        yield pair


class TestLocal(OneSidedConformance):
    pass


@pytest.mark.slow
class TestLocalSlow(TransportConformanceSlow):
    pass
