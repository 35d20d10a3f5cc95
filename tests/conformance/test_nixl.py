"""Transport ``nixl`` keeps the promises of the seam, with what UCX chooses on one host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import PAGE, board_of, check_fault, extents, soon
from llm_datadist.testing.one_sided import PartialConformance
from llm_datadist.testing.rows import RowsConformance
from llm_datadist.testing.transports import Pair, TransportConformanceSlow
from llm_datadist.transports.seam import FaultKind
from tests.support import leaks
from tests.support.nixl_pair import NixlPair, need_nixl

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """But descriptors: UCX opens some when it likes, as long as ``pair`` lives."""
    before = leaks.take()
    yield
    left = leaks.differences(before, fds=False)
    assert not left, f"the test left behind {left}"


@pytest.fixture(scope="module")
def pair() -> Iterator[NixlPair]:
    need_nixl()
    NixlPair().close()  # what stays open once UCX was used
    before = leaks.take()
    with closing(NixlPair()) as pair:
        yield pair
    left = leaks.differences(before)
    assert not left, f"its agents left behind {left}"


@pytest.fixture
def doomed() -> Iterator[NixlPair]:
    need_nixl()
    with closing(NixlPair()) as pair:
        yield pair


class TestNixl(PartialConformance):
    def test_destination_that_cannot_be_written_is_a_destination_fault(self, pair: Pair) -> None:
        """Not registered, or no right to its first page: of later ones UCX does not tell."""
        with board_of(pair, [PAGE], [PAGE]) as board, board_of(pair, [], []) as other:
            page = other.memory.map_sparse(PAGE)
            elsewhere = Segments(extents(board.bases, [(0, PAGE)]), extents([page], [(0, PAGE)]))
            progress = pair.channel.read(elsewhere).wait(deadline=soon())
            check_fault(progress, FaultKind.DESTINATION, PAGE)
            for rights in ("r", ""):
                board.memory.protect(board.here[0], PAGE, rights)
                progress = board.read([(0, PAGE)], [(0, PAGE)])
                check_fault(progress, FaultKind.DESTINATION, PAGE)
                board.memory.protect(board.here[0], PAGE, "rw")
            board.check_read([(0, PAGE)], [(0, PAGE)])


class TestNixlSlow(TestNixl, TransportConformanceSlow):
    pass


class TestNixlRows(RowsConformance):
    """Repeated reads of one unit of each tensor."""
