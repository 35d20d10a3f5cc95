"""Rows E: each kind of failure has its class, its code and words that help; options are checked."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from tests.support import actors
from tests.support.memory import FILL
from tests.support.pair import D_ID, P_ID, Combo, Pair, Shape, of_model
from tests.support.peers import Outcome
from tests.support.pool import Spawner
from tests.support.which_combos import TWO
from tests.support.world import World

S = LLMStatusCode


def _kinds(spawn: Spawner, pair: Pair) -> dict[str, Outcome]:
    """One failure of each kind, the text of each kept."""
    pair.up(timeout_ms=600, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    third = spawn()
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0", 600)
    pair.d.call(actors.link, [(3, third.call(actors.up, 3, values))])
    third.call(actors.blocks_cache, "src", seed=5, model_id=0, **BIG.memory())
    pair.destination("big", BIG)
    found = {
        "unlinked": pair.pull_blocks([0], [0], of_model(0, 99)),
        "missing": pair.pull_blocks([0], [0], of_model(44)),
        "index": pair.pull_blocks([8], [0]),
        "type": pair.pull_blocks("0", [0]),
        "range": pair.pull_blocks([0], [-1]),
    }
    running = pair.d.start(_pull_again_and_again, BIG.dim0)
    assert pair.d.call(_has_begun)
    third.kill()
    found["killed"] = running.outcome()
    if pair.combo.mode == "A":
        pair.p.stop()
        found["stopped"] = pair.pull_blocks([0], [0])
        pair.p.cont()
    pair.pull_blocks([1], [2]).ok()
    pair.d.call(actors.finalize)
    found["finalized"] = pair.pull_blocks([0], [0])
    found["before init"] = pair.d.attempt(_use_before_init)
    return found


BIG = Shape(tensors=4, dim0=64, stride=1 << 20)


def _pull_again_and_again(w: World, blocks: int) -> None:
    every = list(range(blocks))
    while True:  # on a busy machine its time may be over before anybody has been killed
        with contextlib.suppress(dd.TransferTimeoutError):
            actors.pull_blocks(w, of_model(0, 3), "big", every, every)


def _begun(w: World) -> bool:
    return bool(w.held["big"].tensor(0)[0] != FILL)


def _has_begun(w: World) -> bool:
    return actors.wait_until(lambda: _begun(w), 20.0)


def _use_before_init(w: World) -> None:
    dd.LLMDataDist(dd.LLMRole.MIX, 5).link_clusters([actors.cluster(1, ("127.0.0.1", 1))])


def _hold(found: dict[str, Outcome], address: tuple[str, int]) -> None:
    where = f"{address[0]}:{address[1]}"
    found["unlinked"].expect(S.LLM_NOT_YET_LINK, 99).raised(dd.NotLinkedError)
    found["missing"].expect(S.LLM_KV_CACHE_NOT_EXIST, 44, P_ID).raised(dd.CacheNotExistError)
    found["index"].expect(S.LLM_PARAM_INVALID, 8).raised(dd.ParamInvalidError)
    found["killed"].expect(S.LLM_LINK_FAILED, 3).raised(dd.LinkFailedError)
    if "stopped" in found:
        stopped = found["stopped"].expect(S.LLM_WAIT_PROCESS_TIMEOUT, P_ID, where, "ms")
        stopped.raised(dd.TransferTimeoutError)
    found["finalized"].expect(S.LLM_ENGINE_FINALIZED).raised(dd.EngineFinalizedError)
    assert isinstance(found["before init"].error, RuntimeError)
    assert type(found["type"].error) is TypeError
    assert type(found["range"].error) is ValueError
    for outcome in found.values():
        assert outcome.text
        assert outcome.code not in (S.LLM_SUCCESS, S.LLM_FAILED)


@pytest.mark.rule("1.34", "1.39")
@TWO
def test_e1_each_kind_of_failure_is_told_apart(spawn: Spawner, pair: Pair) -> None:
    found = _kinds(spawn, pair)
    _hold(found, pair.address)


class _Raises(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise ValueError("a handler that fails")


def _break_logging(w: World, how: str) -> None:
    logger = logging.getLogger("llm_datadist")
    if how == "raising":
        handler = _Raises()
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        w.extras["handler"] = _Remove(handler)
    elif how == "disabled":
        logging.disable(logging.CRITICAL)
    else:
        w.extras["streams"] = _Restore(sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - closed in the next line
        sys.stdout.close()


class _Remove:
    def __init__(self, handler: logging.Handler) -> None:
        self._handler = handler

    def close(self) -> None:
        logger = logging.getLogger("llm_datadist")
        logger.removeHandler(self._handler)
        logger.setLevel(logging.NOTSET)


class _Restore:
    def __init__(self, out: Any, err: Any) -> None:
        self._streams = out, err

    def close(self) -> None:
        sys.stdout, sys.stderr = self._streams


@pytest.mark.parametrize("combo_a", [Combo("A", "tcp")], ids=str, indirect=True)
@pytest.mark.parametrize("how", ["raising", "disabled", "closed"])
def test_e3_reporting_a_failure_does_not_fail(spawn: Spawner, pair_a: Pair, how: str) -> None:
    pair_a.d.call(_break_logging, how)
    _hold(_kinds(spawn, pair_a), pair_a.address)


# ---- E4 -------------------------------------------------------------------------------------------

SETTERS: list[tuple[str, Any, Any]] = [
    *(("listen_ip_info", value, ValueError) for value in (
        "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:3.14", "", "a:b:c",
    )),
    *(("link_retry_count", value, ValueError) for value in (0, -1, 101)),
    *(("link_total_time", value, ValueError) for value in (-1, 2**32)),
    *(("sync_kv_timeout", value, ValueError) for value in (0, -5, "-5", "abc", "0", "")),
    ("sync_kv_timeout", 1.5, TypeError),
    ("sync_kv_timeout", True, TypeError),
    ("link_retry_count", True, TypeError),
    ("link_total_time", 1.5, TypeError),
    ("listen_ip_info", 5, TypeError),
]  # fmt: skip
RAW = {
    "listen_ip_info": "llm.listenIpInfo",
    "link_retry_count": "llm.LinkRetryCount",
    "link_total_time": "llm.LinkTotalTime",
    "sync_kv_timeout": "llm.SyncKvCacheWaitTime",
}


@pytest.mark.rule("3.21", "3.72")
@pytest.mark.parametrize(("name", "value", "kind"), SETTERS)
def test_e4_a_setter_refuses_a_bad_value(name: str, value: Any, kind: type[Exception]) -> None:
    config = dd.LLMConfig()
    with pytest.raises((TypeError, ValueError, LLMException)) as caught:
        setattr(config, name, value)
    if kind is TypeError:
        assert caught.type is TypeError
    else:
        error = caught.value
        assert isinstance(error, ValueError) or error.status_code == S.LLM_PARAM_INVALID  # type: ignore[union-attr]
        assert str(value) in str(error)
    assert RAW[name] not in config.generate_options()


@pytest.mark.rule("3.71")
@pytest.mark.parametrize(("name", "value"), [(n, v) for n, v, _ in SETTERS if v != 5])
def test_e4_init_refuses_the_same_as_raw_text(name: str, value: Any) -> None:
    options = {**actors.options(listen="127.0.0.1:0"), RAW[name]: str(value)}
    before, fds = dict(options), len(os.listdir("/proc/self/fd"))
    dist = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    with pytest.raises(LLMException) as caught:
        dist.init(options)
    assert caught.value.status_code == S.LLM_PARAM_INVALID
    assert str(value) in str(caught.value)
    assert RAW[name] in str(caught.value)
    assert options == before
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.rule("3.3")
def test_e4_init_does_not_change_the_callers_options(spawn: Spawner) -> None:
    assert spawn().call(_options_before_and_after)


def _options_before_and_after(w: World) -> bool:
    values = {"llm.LocalCommRes": "", "llm.listenIpInfo": "127.0.0.1:0", "ge.exec.deviceId": "0"}
    before = dict(values)
    w.dist = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    w.dist.init(values)
    return values == before


@pytest.mark.rule("3.73")
def test_unknown_options_are_one_warning(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.watch_logs)
    peer.call(actors.up, D_ID, actors.options(NoSuchThing="1"))
    warnings = peer.call(actors.log_records, "WARNING")
    assert len(warnings) == 1
    assert "llm.NoSuchThing" in warnings[0][2]


@pytest.mark.rule("3.33")
@pytest.mark.parametrize("value", ["0", None])
def test_the_cache_manager_must_be_enabled(spawn: Spawner, value: str | None) -> None:
    options = actors.options()
    options["llm.EnableCacheManager"] = value or ""
    if value is None:
        del options["llm.EnableCacheManager"]
    del options["llm.TransferBackend"]
    outcome = spawn().attempt(actors.up, D_ID, options)
    outcome.expect(S.LLM_PARAM_INVALID, "enable_cache_manager")


@pytest.mark.rule("3.13")
def test_the_cause_of_a_system_error_is_kept(spawn: Spawner) -> None:
    first, second = spawn(), spawn()
    address = first.call(actors.up, P_ID, actors.options(listen="127.0.0.1:0"))
    outcome = second.attempt(actors.up, D_ID, actors.options(listen=f"127.0.0.1:{address[1]}"))
    outcome.expect(S.LLM_FAILED, f"127.0.0.1:{address[1]}")
    assert outcome.error is not None
    assert isinstance(outcome.error.__cause__, OSError)
