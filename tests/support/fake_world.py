"""Engines of the test's own process whose transport ``nixl`` has agents that are not NIXL's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llm_datadist._engine import transport_set
from llm_datadist.transports.nixl import NixlTransport
from tests.support.fake_nixl import World


def fake_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """From now on engines of the backend ``nixl`` meet in this world."""
    world = World()

    class Fake(NixlTransport):
        def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
            super().__init__(random_bytes, agents=world.agents)

    monkeypatch.setattr(transport_set, "NixlTransport", Fake)
    return world
