"""Contract 5: pull_cache_async, pull_blocks_async, push_cache_async, push_blocks_async."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors, notify_actors
from tests.support.pair import (
    AT_ONCE,
    D_ID,
    P_ID,
    SUCCESS,
    Combo,
    Pair,
    Shape,
    by_id,
    by_request,
    make_pair,
    of_model,
)
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.which_combos import TWO  # fmt: skip
from tests.support.world import wait_until

FAILED = LLMStatusCode.LLM_FAILED
MIB = 1 << 20
SLOW = Shape(tensors=1, dim0=32, stride=MIB)  # 3.2 s over the slow link
EVERY = list(range(32))


def started(pair: Pair, method: str, key: Any, name: str, *args: Any, side: str = "d", **more: Any) -> Any:
    peer = pair.d if side == "d" else pair.p
    peer.call(notify_actors.start, method, key, name, *args, **more)
    return peer.call(notify_actors.finish)


@pytest.mark.rule("4.103", "5.139")
def test_pulls(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    cache_id = pair.slots("slots", keys=[(5, 0)])
    pair.slot_destination("slot")
    more = {"notify": ("done", b"")}
    assert started(pair, "pull_blocks_async", of_model(0), "dst", [1], [2], **more) == (
        SUCCESS,
        [SUCCESS],
        "",
    )
    assert started(pair, "pull_cache_async", by_id(cache_id), "slot", 3, **more) == (SUCCESS, [SUCCESS], "")
    pair.blocks_right([1], [2])
    pair.blocks_right([0], [3], "slots", "slot")
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "done", b"")] * 2


@pytest.mark.rule("4.103", "5.139")
def test_pushes(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source()
    pair.destination(model_id=0)
    cache_id = pair.slot_destination("slot", accessible=True)
    pair.slots("slots")
    more = {"side": "p", "notify": ("done", b"")}
    key = of_model(0, D_ID)
    assert started(pair, "push_blocks_async", key, "src", [1], [2], **more) == (SUCCESS, [SUCCESS], "")
    key_by_id = by_id(cache_id, 3, D_ID)
    assert started(pair, "push_cache_async", key_by_id, "slots", 1, **more) == (SUCCESS, [SUCCESS], "")
    pair.blocks_right([1], [2])
    pair.blocks_right([1], [3], "slots", "slot")
    assert pair.d.call(notify_actors.get_notifies) == [(P_ID, "done", b"")] * 2


def test_what_concerns_the_peer_is_the_result(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    code, results, text = started(pair, "pull_blocks_async", of_model(9), "dst", [1], [2])
    assert (code, results) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, [code])
    assert "model_id=9" in text
    code, _, text = started(pair, "pull_blocks_async", of_model(0, 77), "dst", [1], [2])
    assert code == LLMStatusCode.LLM_NOT_YET_LINK
    assert "77" in text
    code, _, text = started(pair, "pull_blocks_async", of_model(0), "dst", [99], [2])
    assert code == LLMStatusCode.LLM_PARAM_INVALID
    assert "99" in text
    pair.unchanged()


def test_what_concerns_the_caller_is_raised(pair: Pair) -> None:
    pair.up()
    pair.destination()
    for key, blocks, code in [
        (of_model(0), ([1], [99]), LLMStatusCode.LLM_PARAM_INVALID),
        (of_model(0), ([1, 2], [3]), LLMStatusCode.LLM_PARAM_INVALID),
        (of_model(0, D_ID), ([1], [2]), LLMStatusCode.LLM_PARAM_INVALID),
    ]:
        pair.d.attempt(notify_actors.start, "pull_blocks_async", key, "dst", *blocks).expect(code)
    pair.d.call(actors.unregister, "dst")
    pair.d.attempt(notify_actors.start, "pull_blocks_async", of_model(0), "dst", [1], [2]).expect(
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    )


@pytest.mark.rule("5.118", "5.133")
def test_hundreds_at_once_and_callbacks_that_wait(pair: Pair) -> None:
    """More than may move at once on a link; callbacks may hold as many threads as they like."""
    pair.up(timeout_ms=20_000)
    pair.source()
    pair.destination()
    calls = [([number % 8], [number % 8]) for number in range(300)]
    assert pair.d.call(notify_actors.many, "pull_blocks_async", of_model(0), "dst", calls) == [SUCCESS] * 300
    arguments = ("pull_blocks_async", of_model(0), "dst", ([1], [1]), 100)
    assert pair.d.call(notify_actors.chained, *arguments) == [SUCCESS] * 100
    assert pair.d.call(notify_actors.awaited, *arguments) == [SUCCESS] * 100
    plain = ("pull_blocks", *arguments[1:])
    assert pair.d.call(notify_actors.in_threads, *plain) == [None] * 100
    pair.blocks_right(range(8), range(8))


def test_both_sides_push_hundreds_to_each_other(pair_b: Pair) -> None:
    pair = pair_b.up(timeout_ms=20_000)
    for peer in (pair.p, pair.d):
        peer.call(actors.blocks_cache, "src", seed=11)
        peer.call(actors.blocks_cache, "dst", model_id=3)
    calls = [([number % 8], [number % 8]) for number in range(200)]
    running = [
        peer.start(notify_actors.many, "push_blocks_async", of_model(3, other), "src", calls)
        for peer, other in ((pair.p, D_ID), (pair.d, P_ID))
    ]
    assert [r.result() for r in running] == [[SUCCESS] * 200] * 2


@TWO
def test_idle_threads_end(pair: Pair) -> None:
    pair.up(timeout_ms=5000)
    pair.source()
    pair.destination()
    pair.d.call(notify_actors.many, "pull_blocks_async", of_model(0), "dst", [([0], [0])] * 50)
    assert wait_until(lambda: pair.d.call(notify_actors.threads) == 0, 8.0)


@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.rule("5.116", "5.125")
def test_cancel_stops_a_pull_and_nothing_is_written_afterwards(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        pair.source(shape=SLOW)
        pair.destination(shape=SLOW)
        more = {"notify": ("never", b"")}
        pair.d.call(notify_actors.start, "pull_blocks_async", of_model(0), "dst", EVERY, EVERY, **more)
        actors.pause(0.3)
        cancelled, took = pair.d.call(notify_actors.cancel)
        seen = pair.d.call(actors.digest, "dst")
        assert cancelled and took.within(AT_ONCE)
        assert pair.d.call(notify_actors.finish) == (FAILED, [FAILED], "cancelled by the caller")
        actors.pause(0.5)
        assert pair.d.call(actors.digest, "dst") == seen
        pair.pull_blocks([0], [0]).ok()
        assert pair.p.call(notify_actors.get_notifies) == []


def test_cancel_stops_a_push(spawn: Spawner) -> None:
    with slow_pair(spawn, "B") as pair:
        pair.up_slow()
        pair.source(shape=SLOW)
        pair.destination(shape=SLOW, model_id=0)
        more = {"notify": ("never", b"")}
        pair.p.call(notify_actors.start, "push_blocks_async", of_model(0, D_ID), "src", EVERY, EVERY, **more)
        actors.pause(0.3)
        cancelled, took = pair.p.call(notify_actors.cancel)
        seen = pair.d.call(actors.digest, "dst")
        assert cancelled and took.within(2 * AT_ONCE)
        assert pair.p.call(notify_actors.finish)[:2] == (FAILED, [FAILED])
        actors.pause(0.5)
        assert pair.d.call(actors.digest, "dst") == seen
        assert pair.d.call(notify_actors.get_notifies) == []


def test_cancel_of_what_waits_for_its_turn(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=30_000, HeartbeatIntervalMs="20000")
    pair.source()
    pair.destination()
    pair.p.stop()
    for number in range(70):  # more than may move at once
        pair.d.call(notify_actors.start, "pull_blocks_async", of_model(0), "dst", [1], [2], task=f"t{number}")
    cancelled, took = pair.d.call(notify_actors.cancel, "t69")
    assert cancelled and took.within(AT_ONCE)
    for number in range(69):
        assert pair.d.call(notify_actors.cancel, f"t{number}")[0]
    pair.p.cont()
    pair.unchanged()
    pair.pull_blocks([1], [2]).ok()


@pytest.mark.rule("5.119")
def test_the_time_of_a_call_holds_in_the_background(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.p.stop()
    calls = [([1], [2])] * 100
    outcome = pair.d.attempt(notify_actors.many, "pull_blocks_async", of_model(0), "dst", calls)
    assert outcome.ok() == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT] * 100
    assert outcome.took.about(1.0)
    pair.p.cont()
    pair.unchanged()


@pytest.mark.parametrize("waiting", [1, 100])
def test_finalize_ends_every_task(spawn: Spawner, waiting: int) -> None:
    pair = make_pair(spawn, Combo("A", "tcp")).up(timeout_ms=20_000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.p.stop()
    for number in range(waiting):
        pair.d.call(notify_actors.start, "pull_blocks_async", of_model(0), "dst", [1], [2], task=f"t{number}")
    assert pair.d.attempt(actors.finalize).took.within(2.0)
    codes = {pair.d.call(notify_actors.finish, 1000, f"t{number}")[0] for number in range(waiting)}
    assert codes == {LLMStatusCode.LLM_ENGINE_FINALIZED}
    pair.p.cont()


def test_ids_above_int63_in_the_background(pair_a: Pair) -> None:
    pair = pair_a.up()
    pair.slots("slots", keys=[(2**63 + 5, 0)])
    pair.slot_destination("slot")
    assert started(pair, "pull_cache_async", by_request(2**63 + 5), "slot", 0)[0] == SUCCESS
    pair.blocks_right([0], [0], "slots", "slot")
