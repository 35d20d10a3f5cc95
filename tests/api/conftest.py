"""A facade over an engine that only records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from llm_datadist import LLMDataDist, LLMRole, datadist
from tests.support.fake_engine import FakeEngine

OPTIONS = {"llm.EnableCacheManager": "1"}

Made = tuple[LLMDataDist, FakeEngine]
Make = Callable[..., Made]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Every engine that is made, in order."""
    made: list[FakeEngine] = []

    def new_engine(*arguments: object) -> FakeEngine:
        made.append(FakeEngine(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(datadist, "_new_engine", new_engine)
    return made


@pytest.fixture
def make(engines: list[FakeEngine]) -> Iterator[Make]:
    """Makes an initialised LLMDataDist; the keywords are more options (without "llm.")."""
    alive: list[LLMDataDist] = []

    def make_one(**options: str) -> Made:
        dist = LLMDataDist(LLMRole.DECODER, 1)
        dist.init({**OPTIONS, **{f"llm.{key}": text for key, text in options.items()}})
        alive.append(dist)
        return dist, engines[-1]

    yield make_one
    for dist in alive:
        dist.finalize()
