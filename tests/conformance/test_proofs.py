"""Transports show that they are the other end of a connection, and believe nobody who is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from llm_datadist.testing.proofs import ProofConformance, Two
from llm_datadist.transports.inproc import Hub, InprocTransport
from llm_datadist.transports.movers import Movers
from tests.support.local_pair import Loop
from tests.support.local_pair import transport as local_transport
from tests.support.nixl_rig import Rig
from tests.support.shm_pair import MIB, Shared
from tests.support.shm_pair import transport as shm_transport


class TestInproc(ProofConformance):
    @pytest.fixture
    def two(self) -> Two:
        hub = Hub()
        return Two(InprocTransport(hub), InprocTransport(hub))


class TestLocal(ProofConformance):
    @pytest.fixture
    def two(self) -> Iterator[Two]:
        with (
            closing(Loop()) as loop,
            closing(local_transport(Movers(0), loop)) as owner,
            closing(local_transport(Movers(0))) as reader,
        ):
            yield Two(owner, reader)


class TestShm(ProofConformance):
    @pytest.fixture
    def two(self) -> Iterator[Two]:
        with (
            closing(Shared(MIB)) as area,
            closing(Loop()) as loop,
            closing(shm_transport([area.area], loop=loop)) as owner,
            closing(shm_transport([area.area])) as reader,
        ):
            yield Two(owner, reader)


class TestNixl(ProofConformance):
    """Its agents are not NIXL's."""

    @pytest.fixture
    def two(self) -> Iterator[Two]:
        with closing(Rig()) as rig:
            yield Two(rig.owner, rig.reader)
