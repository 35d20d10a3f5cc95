"""What the engine shows a transport that serves a read: checked, and not to be withdrawn meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.segments import Extents
from llm_datadist._engine import codec
from llm_datadist.transports.seam import Fault
from llm_datadist.transports.tcp_serving import ServedConnection
from tests.support.engines import Engines
from tests.support.memory import FILL

OWNER, READER = 1, 2


@dataclass
class Scene:
    """Two linked engines of mode B over tcp; ``cache_id`` is the owner's."""

    owner: Any
    reader: Any
    cache_id: int
    into: Any
    memory: Any

    @property
    def responder(self) -> Any:
        return self.owner._engine._responder

    @property
    def state(self) -> Any:
        return self.responder._state

    def selector(self, block: int, *, wrong_by: int = 0) -> bytes:
        word = self.state.registry.get(self.cache_id).word
        part = CacheSlice(0, 1, np.array([block], np.uint64), 64, 64)
        return codec.selector(part, self.cache_id, GenerationWord(word.address, word.value + wrong_by), None)

    def ask(self, how: str, token: bytes, selector: bytes) -> tuple[Any, list[Extents]]:
        """What ``open`` or ``send_now`` answered, and what could be sent."""
        shown: list[Extents] = []
        if how == "send_now":
            return self.responder.send_now(token, selector, shown.append), shown
        answer = self.responder.open(token, selector)
        if not isinstance(answer, Fault):
            shown.append(answer.extents)
            answer.close()
        return answer, shown

    @property
    def token(self) -> bytes:
        (token,) = self.state.by_token
        return bytes(token)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Engines("B", "tcp") as engines:
        owner, reader = engines.make(OWNER), engines.make(READER)
        cache, _ = engines.blocks(owner, 7, model_id=5)
        assert engines.link(reader, OWNER, owner) is LLMStatusCode.LLM_SUCCESS
        yield Scene(owner, reader, cache.cache_id, *engines.blocks(reader))


@pytest.mark.parametrize("how", ["open", "send_now"])
def test_what_is_asked_for_is_shown(scene: Scene, how: str) -> None:
    _, (extents,) = scene.ask(how, scene.token, scene.selector(3))
    assert extents.nbytes == 64
    assert not scene.state.flights.where(lambda flight: True)


@pytest.mark.parametrize("how", ["open", "send_now"])
def test_nothing_is_shown_that_is_not_allowed(scene: Scene, how: str) -> None:
    good = scene.selector(0)
    cases = [
        (b"?" * 16, good, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),  # no such link
        (scene.token, scene.selector(0, wrong_by=2), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (scene.token, scene.selector(4), LLMStatusCode.LLM_PARAM_INVALID),  # it has four blocks
        (scene.token, good[:5], LLMStatusCode.LLM_PARAM_INVALID),
    ]
    for token, selector, code in cases:
        answer, shown = scene.ask(how, token, selector)
        assert isinstance(answer, Fault) and answer.code == code
        assert not shown
    assert not scene.state.flights.where(lambda flight: True)


def test_a_small_answer_is_sent_under_the_lock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no key and no lease can end between the check and the last byte."""
    free: list[bool] = []
    send = ServedConnection._send_whole

    def look(connection: ServedConnection, extents: Extents) -> None:
        free.append(scene.state.condition.acquire(blocking=False))
        if free[-1]:
            scene.state.condition.release()
        send(connection, extents)

    monkeypatch.setattr(ServedConnection, "_send_whole", look)
    scene.reader.cache_manager.pull_blocks(BlocksCacheKey(OWNER, 5), scene.into, [0], [1])
    assert free == [False]
    assert (scene.memory[:, 1] == 7).all() and (scene.memory[:, 0] == FILL).all()
