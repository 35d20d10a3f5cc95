"""An interrupt at any step of init leaves nothing of it; one at any step of finalize ends in a finalize."""

from __future__ import annotations

import itertools
import threading

import pytest

from llm_datadist import LLMDataDist, LLMRole
from tests.support import actors, allocated
from tests.support.steps import Steps
from tests.support.world import wait_until

POOL_NBYTES = 1 << 20
END_S = 5.0
STRIDE = 7  # a prime: of what repeats every few steps each is hit in the end
# What strikes while the interpreter takes a generator down it reports, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SOME = [pytest.param(STRIDE, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", SOME)
def test_g12_an_interrupted_init_leaves_nothing_and_an_interrupted_finalize_is_one(stride: int) -> None:
    values = actors.options("B", "auto", "127.0.0.1:0", MemPoolConfig=allocated.pool(POOL_NBYTES))
    threads = threading.active_count()
    for number in itertools.count(1, stride):
        dist = LLMDataDist(LLMRole.MIX, 5)
        init, end = Steps(number), Steps(number)
        begun = init.run(lambda: dist.init(values))  # noqa: B023
        if begun:
            assert dist._engine is None, init.where
            assert wait_until(lambda: threading.active_count() == threads, END_S), init.where
            dist.init(values)  # another object may be initialised as well: none is
        ended = end.run(dist.finalize)
        if ended:
            dist.finalize()
        assert dist._engine is None, end.where
        assert wait_until(lambda: threading.active_count() == threads, END_S), end.where
        if not begun and not ended:
            break
    assert number > 20
