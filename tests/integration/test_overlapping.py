"""Source and destination that share bytes, within one engine or two of one process: refused, nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMDataDist, LLMException, LLMStatusCode, ParamInvalidError
from tests.support.engines import Engines, Layers
from tests.support.pair import COMBOS, SUCCESS, Combo

INVALID = LLMStatusCode.LLM_PARAM_INVALID
BLOCKS = ([0, 1], [0, 1])
APART = ([0], [2])


class Shared(Engines):
    """One memory with two caches in it, the peer's (model 0) and mine, which begins half a block later."""

    def __init__(self, combo: Combo, what: str, *, alone: bool) -> None:
        super().__init__(combo.mode, combo.backend)
        self.me = self.make(1)
        self.peer: LLMDataDist = self.me if alone else self.make(2)
        self.peer_id = 1 if alone else 2
        assert self.link(self.me, self.peer_id, self.peer) == SUCCESS
        self.memory = self.space(self.peer if what == "pull" else self.me, (2, 800))
        self.memory[:] = np.arange(2 * 400, dtype=np.uint16).view(np.uint8).reshape(2, 800)
        self.theirs = self.memory[:, :512].reshape(2, 8, 64)
        self.register(self.peer, self.theirs, 0)
        self.cache = self.register(self.me, self.memory[:, 32:544].reshape(2, 8, 64))
        self.before = self.memory.copy()

    def outcome(self, what: str, blocks: tuple[list[int], list[int]]) -> LLMStatusCode:
        key, manager = BlocksCacheKey(self.peer_id, 0), self.me.cache_manager
        try:
            if what == "layers":
                to = (self.peer_id, 0, self.theirs)
                return self.push_layers(self.me, self.cache, to, Layers(), blocks).synchronize(5000)
            move: Any = manager.pull_blocks if what == "pull" else manager.push_blocks
            move(key, self.cache, *blocks)
        except LLMException as exc:
            assert exc.status_code != INVALID or isinstance(exc, ParamInvalidError)
            return exc.status_code
        return SUCCESS


WAYS = [
    pytest.param(combo, what, alone, id=f"{combo}-{what}-{'self' if alone else 'two'}")
    for combo in COMBOS
    for what in ("pull", "push", "layers")
    for alone in (False, True)
    if not (what == "push" and combo.mode == "A") and not (what == "pull" and alone)
]


@pytest.mark.parametrize(("combo", "what", "alone"), WAYS)
@pytest.mark.rule("5.136")
def test_what_overlaps_is_refused_and_the_rest_works(combo: Combo, what: str, alone: bool) -> None:
    with Shared(combo, what, alone=alone) as shared:
        assert shared.outcome(what, BLOCKS) == INVALID
        assert shared.outcome(what, ([1], [0] if what == "pull" else [2])) == INVALID
        assert np.array_equal(shared.memory, shared.before)
        assert shared.outcome(what, APART) == SUCCESS
        assert not np.array_equal(shared.memory, shared.before)
