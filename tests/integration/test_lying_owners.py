"""An owner that shows no addresses to a reader by address: the reader gets an error of the family, never another."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException
from llm_datadist._engine.handler import Handler
from llm_datadist._engine.state import State
from tests.support.engines import Engines
from tests.support.pair import SUCCESS


@pytest.mark.parametrize("message", ["Grant", "Found", "Announce"])
@pytest.mark.parametrize("shown", [b"", b"\1" * 8, b"\1" * 7], ids=["none", "one", "seven bytes"])
def test_addresses_that_are_missing(message: str, shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    shown_to: Any = State.shown_to

    def lie(state: State, *args: Any) -> Any:
        entry, addresses = shown_to(state, *args)
        return entry, shown if state.cluster_id == 1 else addresses

    monkeypatch.setattr(State, "shown_to", lie)
    if message == "Found":
        monkeypatch.setattr(Handler, "_announced", lambda *_: None)
    with Engines("A" if message == "Grant" else "B", "local") as engines:
        owner, reader = engines.make(1), engines.make(2)
        assert engines.link(reader, 1, owner) == SUCCESS
        engines.blocks(owner, 1, model_id=0)
        cache, memory = engines.blocks(reader)
        with pytest.raises(LLMException):
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
        assert (memory == 0xA5).all()
        task = reader.cache_manager.pull_blocks_async(BlocksCacheKey(1, 0), cache, [1], [2])
        assert isinstance(task.exception(5000), LLMException)
