"""The shipped conformance suite over ``tcp``, the owner in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm_datadist.testing.transports import TransportConformance
from tests.support.tcp_rig import ProcessRig


class TestTcp(TransportConformance):
    @pytest.fixture
    def pair(self) -> Iterator[ProcessRig]:
        rig = ProcessRig()
        yield rig
        rig.close()

    @pytest.fixture
    def doomed(self, pair: ProcessRig) -> ProcessRig:
        return pair
