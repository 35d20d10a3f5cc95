"""Pulls of one block again and again over transport ``nixl``, within one host and over TCP: as ``test_express``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import test_express as express
from tests.integration.test_express import (  # noqa: F401 - collected here, with the fixture of this file
    test_c_many_threads_pull_one_block_each,
    test_f_a_forked_child_is_refused_and_does_not_disturb,
    test_s1_a_cache_withdrawn_after_many_pulls_is_not_read,
    test_s2_a_block_is_of_one_generation,
    test_t3_an_owner_that_dies_in_the_middle,
    test_the_bytes_are_right,
    test_unlinking_with_force_in_the_middle,
    test_unregistering_the_destination_in_the_middle,
)
from tests.support.nixl_engines import NIXL_B, OVER_TCP, QUIET
from tests.support.nixl_pair import need_nixl
from tests.support.pair import Pair
from tests.support.pool import Spawner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(params=[QUIET, {**QUIET, **OVER_TCP}], ids=["host", "tcp"])
def warm(_leaves_nothing: None, request: pytest.FixtureRequest) -> Iterator[Pair]:
    need_nixl()
    spawner = Spawner(request.param)
    pair = Pair(spawner(), spawner(), NIXL_B).up()
    pair.d.call(express._count)
    pair.source(shape=express.SHAPE)
    pair.destination(shape=express.SHAPE)
    pair.d.call(express._pull_until_short)
    yield pair
    left = spawner.close()
    assert not left, "; ".join(left)
