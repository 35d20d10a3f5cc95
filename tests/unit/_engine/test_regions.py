"""What registering transports are told of our memory, and what peers are given for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import U64
from llm_datadist._engine.regions import Regions
from llm_datadist.enums import Placement
from llm_datadist.transports.seam import Region, RegistrationRefused

PAGE = 4096


class Registering:
    """Knows what is registered with it; refuses what lies at an odd page."""

    def __init__(self, name: str, refuses: bool = False) -> None:
        self.name = name
        self.known: dict[bytes, list[int]] = {}
        self._refuses = refuses
        self._count = 0

    def register(self, region: Region) -> bytes:
        if self._refuses:
            raise RegistrationRefused("not this memory")
        self._count += 1
        token = f"{self.name}{self._count}".encode()
        self.known[token] = region.bases.tolist()
        return token

    def unregister(self, token: bytes) -> None:
        del self.known[token]


def bases(*pages: int) -> U64:
    return np.array(pages, dtype=np.uint64) * np.uint64(PAGE)


@pytest.fixture
def a() -> Registering:
    return Registering("a")


@pytest.fixture
def regions(a: Registering) -> Regions:
    regions = Regions()
    regions.use(a)  # type: ignore[arg-type]
    return regions


def test_a_cache_is_registered_until_it_is_freed(regions: Regions, a: Registering) -> None:
    regions.keep(1, regions.register(bases(1, 2), PAGE))
    assert regions.has(1) and a.known == {b"a1": bases(1, 2).tolist()}
    assert regions.token(1, ("tcp", "a")) == b"a1"
    regions.free(1)
    regions.free(1)
    assert not regions.has(1) and not a.known
    assert regions.token(1, ("a",)) == b""


def test_a_peer_gets_the_token_of_a_transport_that_it_reads_by(regions: Regions) -> None:
    regions.use(Registering("b"))  # type: ignore[arg-type]
    regions.keep(1, regions.register(bases(1), PAGE))
    assert [regions.token(1, names) for names in (("b",), ("a",), ("b", "a"), ("tcp",), ())] == [
        b"b1",
        b"a1",
        b"b1",
        b"",
        b"",
    ]


def test_what_one_refuses_the_others_have(a: Registering, caplog: pytest.LogCaptureFixture) -> None:
    regions = Regions()
    for transport in (Registering("no", refuses=True), a):
        regions.use(transport)  # type: ignore[arg-type]
    with caplog.at_level("INFO", "llm_datadist.cache"):
        tokens = regions.register(bases(1, 2), PAGE)
    assert tokens == {"a": b"a1"}
    assert caplog.messages == ["2 tensors of 4096 bytes go by another transport than no: not this memory"]
    regions.forget(tokens)
    assert not a.known


def test_what_nobody_takes_is_no_registered_memory() -> None:
    regions = Regions()
    regions.keep(1, regions.register(bases(1), PAGE))
    assert not regions.has(1) and regions.token(1, ("a",)) == b""
    assert not regions.renew(1, bases(1), PAGE)
    regions.free(1)


def test_caches_in_a_pool_share_its_registration(regions: Regions, a: Registering) -> None:
    regions.add_pool(Placement.DEVICE, PAGE, 8 * PAGE)
    for cache_id in (1, 2):
        regions.keep_pooled(cache_id, Placement.DEVICE)
        assert regions.token(cache_id, ("a",)) == b"a1"
        assert not regions.has(cache_id), "its memory stays mapped: nobody has to be asked"
    regions.keep_pooled(3, Placement.HOST)
    assert regions.token(3, ("a",)) == b""
    regions.free(1)
    assert regions.token(2, ("a",)) == b"a1" and a.known == {b"a1": [PAGE]}


def test_memory_that_was_mapped_anew_is_registered_anew(regions: Regions, a: Registering) -> None:
    regions.keep(1, regions.register(bases(1), PAGE))
    assert regions.renew(1, bases(1), PAGE)
    assert a.known == {b"a2": [PAGE]} and regions.token(1, ("a",)) == b"a2"


def test_a_remap_leaves_the_pools_registration(regions: Regions, a: Registering) -> None:
    """The catalog does not ask for it; if it did, other caches of the pool would lose theirs."""
    regions.add_pool(Placement.HOST, PAGE, 8 * PAGE)
    regions.keep_pooled(1, Placement.HOST)
    regions.renew(1, bases(1), PAGE)
    assert b"a1" in a.known


def test_a_transport_may_be_gone_when_memory_is_forgotten(regions: Regions, a: Registering) -> None:
    regions.forget({"another": b"x"})
    tokens: dict[str, Any] = dict(regions.register(bases(1), PAGE))
    regions.forget(tokens)
    assert not a.known
