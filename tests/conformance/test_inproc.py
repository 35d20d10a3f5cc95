"""The reference twin ``inproc`` keeps the promises of the seam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_datadist._core.segments import Extents
from llm_datadist.testing.one_sided import OneSidedConformance
from llm_datadist.testing.owner import Memory
from llm_datadist.transports.inproc import Hub, InprocTransport
from llm_datadist.transports.seam import PeerEndpoint, TransportUnavailable
from tests.support.local_pair import PROOF


class InprocPair(Memory):
    """A ``testing.transports.Pair`` whose owner lives in this process."""

    def __init__(self) -> None:
        super().__init__()
        hub = Hub()
        self._owner = InprocTransport(hub)
        self.channel = InprocTransport(hub).open(_endpoint(self._owner.endpoint(PROOF)), deadline=0)

    def source(self, extents: Extents) -> Extents:
        return extents

    def stop(self) -> None:
        """There is no process to stop."""

    def resume(self) -> None:
        """There is no process to stop."""

    def kill(self) -> None:
        self._owner.close()


def _endpoint(blob: bytes) -> PeerEndpoint:
    return PeerEndpoint(1, blob, b"", None, lambda count: None, PROOF)


@pytest.fixture(scope="module")
def pair() -> Iterator[InprocPair]:
    with closing(InprocPair()) as pair:
        yield pair


@pytest.fixture
def doomed() -> Iterator[InprocPair]:
    with closing(InprocPair()) as pair:
        yield pair


class TestInproc(OneSidedConformance):
    pass


def test_unknown_or_closed_peer_is_unavailable() -> None:
    hub = Hub()
    reader, owner = InprocTransport(hub), InprocTransport(hub)
    with pytest.raises(TransportUnavailable, match="not in the same process"):
        reader.open(_endpoint(b"someone"), deadline=0)
    owner.close()
    with pytest.raises(TransportUnavailable, match="not in the same process"):
        reader.open(_endpoint(owner.endpoint(PROOF)), deadline=0)
