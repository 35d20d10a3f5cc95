"""Every status code that the contract gives a meaning comes out of a real call; see docs/reference/compatibility.md.

The codes that nothing gives, and that the page marks "never", are checked by tests/api/test_compatibility_page.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from tests.api.test_compatibility_page import NAME, rows
from tests.support import actors, notify_actors
from tests.support.pair import P_ID, Combo, Pair, Shape, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.sockets import refusing_address
from tests.support.world import World

MANAGED, ACCESSIBLE = Combo("A", "tcp"), Combo("B", "local")


def code_of(outcome: Any) -> LLMStatusCode:
    error = outcome.error
    assert isinstance(error, LLMException), outcome
    assert str(error)
    return error.status_code


def second_instance(w: World) -> None:
    dd.LLMDataDist(dd.LLMRole.MIX, 9).init({"llm.EnableCacheManager": "1"})


def with_a_later_option(w: World) -> None:
    dd.LLMDataDist(dd.LLMRole.MIX, 9).init({"llm.EnableCacheManager": "1", "llm.AuthToken": "x"})


def allocate(w: World, nbytes: int) -> None:
    w.dist.cache_manager.allocate_cache(dd.CacheDesc(1, [1, nbytes], dd.DataType.DT_UINT8))


def switch(w: World) -> None:
    w.dist.switch_role(dd.LLMRole.PROMPT)


def success(pair: Pair) -> LLMStatusCode:
    code: LLMStatusCode = pair.up(link=False).d.call(actors.link, [(P_ID, pair.address)])[0]
    return code


def failed(pair: Pair) -> LLMStatusCode:
    return code_of(pair.up().d.attempt(second_instance))


def wait_process_timeout(pair: Pair) -> LLMStatusCode:
    pair.up(timeout_ms=300).source()
    pair.destination()
    pair.p.stop()
    return code_of(pair.pull_blocks([0], [0]))


def kv_cache_not_exist(pair: Pair) -> LLMStatusCode:
    pair.up().destination()
    return code_of(pair.pull_blocks([0], [0]))


def param_invalid(pair: Pair) -> LLMStatusCode:
    pair.up().destination()
    return code_of(pair.pull_blocks([0, 1], [0]))


def engine_finalized(pair: Pair) -> LLMStatusCode:
    pair.up().d.call(actors.finalize)
    return code_of(pair.d.attempt(actors.links))


def not_yet_link(pair: Pair) -> LLMStatusCode:
    return code_of(pair.up(link=False).d.attempt(actors.check_link, P_ID))


def already_link(pair: Pair) -> LLMStatusCode:
    code: LLMStatusCode = pair.up().d.call(actors.link, [(P_ID, pair.address)])[0]
    return code


def link_failed(pair: Pair) -> LLMStatusCode:
    code: LLMStatusCode = pair.up(link=False).d.call(actors.link, [(P_ID, refusing_address())])[0]
    return code


def unlink_failed(pair: Pair) -> LLMStatusCode:
    pair.up().p.stop()
    running = pair.asking(actors.unlink, [P_ID], 10_000)
    pair.p.kill()
    code: LLMStatusCode = running.result()[0]
    return code


def exist_link(pair: Pair) -> LLMStatusCode:
    return code_of(pair.up().d.attempt(switch))


def feature_not_enabled(pair: Pair) -> LLMStatusCode:
    return code_of(pair.d.attempt(with_a_later_option))


def timeout(pair: Pair) -> LLMStatusCode:
    pair.up(timeout_ms=300).p.stop()
    return code_of(pair.d.attempt(notify_actors.send_notify, P_ID, "n", b""))


def link_busy(pair: Pair) -> LLMStatusCode:
    pair.up(timeout_ms=5000).source(shape=Shape())
    pair.destination()
    pair.p.stop()
    running = pair.asking(actors.pull_blocks, of_model(0), "dst", [0], [0])
    code: LLMStatusCode = pair.d.call(actors.unlink, [P_ID], 300)[0]
    pair.p.cont()
    running.result()
    return code


def out_of_memory(pair: Pair) -> LLMStatusCode:
    pair.up(MemPoolConfig='{"memory_size": 65536}')
    return code_of(pair.d.attempt(allocate, 65537))


PRODUCERS: dict[str, tuple[Combo, Callable[[Pair], LLMStatusCode]]] = {
    "LLM_SUCCESS": (MANAGED, success),
    "LLM_FAILED": (MANAGED, failed),
    "LLM_WAIT_PROCESS_TIMEOUT": (MANAGED, wait_process_timeout),
    "LLM_KV_CACHE_NOT_EXIST": (ACCESSIBLE, kv_cache_not_exist),
    "LLM_PARAM_INVALID": (MANAGED, param_invalid),
    "LLM_ENGINE_FINALIZED": (MANAGED, engine_finalized),
    "LLM_NOT_YET_LINK": (MANAGED, not_yet_link),
    "LLM_ALREADY_LINK": (ACCESSIBLE, already_link),
    "LLM_LINK_FAILED": (MANAGED, link_failed),
    "LLM_UNLINK_FAILED": (MANAGED, unlink_failed),
    "LLM_EXIST_LINK": (MANAGED, exist_link),
    "LLM_FEATURE_NOT_ENABLED": (MANAGED, feature_not_enabled),
    "LLM_TIMEOUT": (ACCESSIBLE, timeout),
    "LLM_LINK_BUSY": (MANAGED, link_busy),
    "LLM_OUT_OF_MEMORY": (MANAGED, out_of_memory),
}
# Given only for the code of a later version, by a peer of that version: tests/unit/_engine/test_failures.py.
BY_LATER_PEERS = {"LLM_UNKNOWN_ERROR"}


def test_every_code_that_the_page_gives_a_meaning_is_here() -> None:
    given = {NAME.findall(code)[0] for code, when in rows("Status codes") if not when.startswith("never")}
    assert given == set(PRODUCERS) | BY_LATER_PEERS


@pytest.mark.rule("1.21")
@pytest.mark.parametrize("name", PRODUCERS)
def test_code(name: str, spawn: Spawner) -> None:
    combo, produce = PRODUCERS[name]
    pair = make_pair(spawn, combo)
    try:
        assert str(produce(pair)) == f"LLMStatusCode.{name}"
    finally:
        if pair.p.alive:
            pair.p.cont()
