"""Fixtures of the tests of transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm_datadist.testing.stream_owner import ExtentsSource, first_frame
from llm_datadist.transports.tcp import TcpTransport
from tests.support.tcp_rig import MakeRig, Rig, free_memory


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
    free_memory()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


@pytest.fixture
def reader() -> Iterator[TcpTransport]:
    transport = TcpTransport(ExtentsSource(), first_frame)
    yield transport
    transport.close()
    free_memory()
