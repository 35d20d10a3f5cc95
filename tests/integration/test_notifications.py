"""Contract 4, Notifications: delivered after the data, never before, never on failure."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._core.limits import NOTIFICATIONS
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors, notify_actors
from tests.support.pair import AT_ONCE, D_ID, P_ID, Combo, Pair, Shape, by_id, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.slow import slow_pair
from tests.support.which_combos import SHM_LATER
from tests.support.world import World, wait_until

FULL = LLMStatusCode.LLM_OUT_OF_MEMORY
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
WAIT_TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
MIB = 1 << 20


@pytest.mark.rule("4.98", "4.99", "4.100")
def test_both_sides_send_and_fetch_in_order(pair: Pair) -> None:
    pair.up()
    largest = ("n" * (64 << 10), bytes(range(256)) * 256)
    for name, message in [("a", b"1"), ("", b""), largest, ("ü" * 10, b"\0")]:
        pair.d.call(notify_actors.send_notify, P_ID, name, message)
    pair.p.call(notify_actors.send_notify, D_ID, "back", b"x")
    assert pair.p.call(notify_actors.get_notifies) == [
        (D_ID, "a", b"1"), (D_ID, "", b""), (D_ID, *largest), (D_ID, "ü" * 10, b"\0"),
    ]  # fmt: skip
    assert pair.p.call(notify_actors.get_notifies) == []
    assert pair.d.call(notify_actors.get_notifies) == [(P_ID, "back", b"x")]


def test_to_oneself_and_to_nobody(pair: Pair) -> None:
    pair.up()
    pair.d.attempt(notify_actors.send_notify, 77, "a", b"").expect(LLMStatusCode.LLM_NOT_YET_LINK, 77)
    assert pair.p.call(actors.link, [(P_ID, pair.address)])[0] == LLMStatusCode.LLM_SUCCESS
    pair.p.call(notify_actors.send_notify, P_ID, "self", b"s")
    assert pair.p.call(notify_actors.get_notifies) == [(P_ID, "self", b"s")]


@pytest.mark.rule("4.103")
def test_pulls_notify_their_owner(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    cache_id = pair.slots("slots", keys=[(5, 0)])
    pair.slot_destination("slot")
    pair.pull_blocks([1], [2], notify=("pulled", b"blocks")).ok()
    pair.pull_cache(by_id(cache_id), 1, name="slot", notify=("pulled", b"slot")).ok()
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "pulled", b"blocks"), (D_ID, "pulled", b"slot")]
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.103")
def test_pushes_notify_their_destination(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source()
    pair.destination(model_id=0)
    cache_id = pair.slot_destination("slot", accessible=True)
    pair.slots("slots")
    pair.p.call(actors.push_blocks, of_model(0, D_ID), "src", [1], [2], notify=("pushed", b"blocks"))
    pair.p.call(actors.push_cache, by_id(cache_id, 3, D_ID), "slots", notify=("pushed", b"slot"))
    assert pair.d.call(notify_actors.get_notifies) == [(P_ID, "pushed", b"blocks"), (P_ID, "pushed", b"slot")]
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.105")
def test_a_push_that_moves_nothing_still_notifies_nobody_on_failure(pair_b: Pair) -> None:
    pair = pair_b.up()
    pair.source()
    pair.destination(model_id=0)
    more: dict[str, Any] = {"notify": ("no", b"")}
    pair.p.attempt(actors.push_blocks, of_model(9, D_ID), "src", [1], [2], **more).expect(
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    )
    pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [99], **more).expect(
        LLMStatusCode.LLM_PARAM_INVALID
    )
    assert pair.d.call(notify_actors.get_notifies) == []


@pytest.mark.rule("4.105")
def test_a_failed_pull_notifies_nobody(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    pair.pull_blocks([99], [2], notify=("no", b"")).expect(LLMStatusCode.LLM_PARAM_INVALID)
    pair.pull_blocks([1], [2], key=of_model(9), notify=("no", b"")).expect(
        LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    )
    assert pair.p.call(notify_actors.get_notifies) == []


@SHM_LATER
@pytest.mark.rule("4.101", "4.102")
def test_a_full_queue_refuses_while_the_data_is_complete(pair: Pair) -> None:
    pair.up(timeout_ms=5000)
    pair.source()
    pair.destination()
    pair.d.call(notify_actors.send_many, P_ID, NOTIFICATIONS)
    pair.d.attempt(notify_actors.send_notify, P_ID, "one", b"").expect(
        FULL, P_ID, NOTIFICATIONS, "get_notifies"
    )
    pair.pull_blocks([1], [2], notify=("two", b"")).expect(FULL, P_ID, "complete", "get_notifies")
    pair.blocks_right([1], [2])
    found = pair.p.call(notify_actors.get_notifies)
    assert [name for _, name, _ in found] == [f"n{number}" for number in range(NOTIFICATIONS)]
    pair.d.call(notify_actors.send_notify, P_ID, "three", b"")
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "three", b"")]


@pytest.mark.rule("4.102")
def test_a_push_to_a_full_queue_is_complete_as_well(pair_b: Pair) -> None:
    pair = pair_b.up(timeout_ms=5000)
    pair.source()
    pair.destination(model_id=0)
    pair.p.call(notify_actors.send_many, D_ID, NOTIFICATIONS)
    pushed = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [2], notify=("x", b""))
    pushed.expect(FULL, D_ID, "complete", "get_notifies")
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.104")
@pytest.mark.parametrize("mode", ["A", "B"])
def test_the_data_is_there_before_the_notification(spawn: Spawner, mode: str) -> None:
    """Over a slow link, seen from the other side: when it comes, every byte is there."""
    with slow_pair(spawn, mode) as pair:
        pair.up_slow()
        shape = Shape(tensors=1, dim0=4, stride=MIB)  # 0.4 s
        pair.source(shape=shape)
        pair.destination(shape=shape)
        blocks = list(range(4))
        running = pair.d.start(actors.pull_blocks, of_model(0), "dst", blocks, blocks, notify=("done", b""))
        told: list[Any] = []
        assert wait_until(lambda: bool(told.extend(pair.p.call(notify_actors.get_notifies)) or told))
        pair.blocks_right(blocks, blocks)
        assert told == [(D_ID, "done", b"")]
        running.result()


@pytest.mark.rule("4.105")
def test_a_stopped_process_gets_nothing_of_a_call_that_failed(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "local")).up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.pull_blocks([0], [0]).ok()
    pair.p.stop()
    sent = pair.d.attempt(notify_actors.send_notify, P_ID, "sent", b"x" * (64 << 10)).expect(
        TIMEOUT, P_ID, "ms"
    )
    pulled = pair.pull_blocks([1], [2], notify=("pulled", b"")).expect(WAIT_TIMEOUT, P_ID, "complete")
    assert sent.took.about(1.0) and pulled.took.about(1.0)
    pair.p.cont()
    pair.d.call(notify_actors.send_notify, P_ID, "later", b"")
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "later", b"")]


@pytest.mark.rule("4.105")
def test_a_stopped_destination_gets_nothing_of_a_push_that_failed(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "local")).up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination(model_id=0)
    pair.d.stop()
    pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [2], notify=("no", b"")).expect(TIMEOUT)
    pair.d.cont()
    pair.p.call(notify_actors.send_notify, D_ID, "later", b"")
    assert pair.d.call(notify_actors.get_notifies) == [(P_ID, "later", b"")]
    pair.unchanged()


def test_a_link_that_goes_down_ends_the_call(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("A", "tcp")).up(timeout_ms=10_000, HeartbeatIntervalMs="5000")
    pair.p.stop()
    running = pair.asking(notify_actors.send_notify, P_ID, "a", b"")
    watch = Stopwatch()
    pair.p.kill()
    running.outcome().expect(LLMStatusCode.LLM_LINK_FAILED, P_ID)
    assert watch.within(AT_ONCE)


def test_a_new_life_begins_with_an_empty_queue(pair: Pair) -> None:
    pair.up()
    pair.d.call(notify_actors.send_notify, P_ID, "old", b"")
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0")
    pair.p.call(actors.finalize)
    pair.p.attempt(notify_actors.get_notifies).expect(LLMStatusCode.LLM_ENGINE_FINALIZED)
    pair.address = pair.p.call(_again, values)
    pair.link()
    assert pair.p.call(notify_actors.get_notifies) == []
    pair.d.call(notify_actors.send_notify, P_ID, "new", b"")
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "new", b"")]


def _again(w: World, values: dict[str, str]) -> Any:
    w.dist.init(values)
    return w.dist.listen_address
