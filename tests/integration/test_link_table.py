"""The table of link_clusters and unlink_clusters, row by row."""

from __future__ import annotations

from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from tests.support import actors, sockets
from tests.support.pair import AT_ONCE, D_ID, P_ID, SUCCESS, Pair, of_model
from tests.support.pool import Spawner
from tests.support.which_combos import TWO
from tests.support.world import World, wait_until

INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = LLMStatusCode.LLM_LINK_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


def _up(peer: Any, cluster_id: int, mode: str = "A", backend: str = "auto", listen: str | None = None) -> Any:
    return peer.call(actors.up, cluster_id, actors.options(mode, backend, listen))


@pytest.mark.rule("1.36", "4.15", "4.25")
def test_link_to_nobody_fails_at_once(spawn: Spawner) -> None:
    peer = spawn()
    _up(peer, D_ID)
    peer.call(actors.watch_logs)
    outcome = peer.attempt(actors.link, [(P_ID, sockets.refusing_address())])
    assert outcome.value == (FAILED, [FAILED])
    assert outcome.took.within(AT_ONCE)
    assert len(peer.call(actors.log_records, "WARNING")) == 1


@pytest.mark.rule("4.13")
def test_link_with_an_empty_list(spawn: Spawner) -> None:
    peer = spawn()
    _up(peer, D_ID)
    assert peer.call(actors.link, []) == (INVALID, [])


@pytest.mark.rule("4.6")
@pytest.mark.parametrize("bad", [0, -1, 2**31, 1.5, True])
def test_link_refuses_a_bad_timeout(spawn: Spawner, bad: Any) -> None:
    peer = spawn()
    address = _up(peer, D_ID, listen="127.0.0.1:0")
    outcome = peer.attempt(actors.link, [(P_ID, address)], bad)
    if isinstance(bad, (bool, float)):
        assert type(outcome.error) is TypeError
    else:
        assert isinstance(outcome.error, ValueError) or outcome.code == INVALID


@pytest.mark.rule("4.17")
@pytest.mark.parametrize("count", [0, 2])
def test_link_needs_exactly_one_remote_address(spawn: Spawner, count: int) -> None:
    peer = spawn()
    address = _up(peer, D_ID, listen="127.0.0.1:0")
    assert peer.call(_link_with_addresses, [address] * count) == (INVALID, [INVALID])


def _link_with_addresses(w: World, addresses: list[tuple[str, int]]) -> Any:
    info = actors.cluster(P_ID)
    for address in addresses:
        info.append_remote_ip_info(*address)
    return w.dist.link_clusters([info], 1000)


@pytest.mark.rule("4.18")
def test_link_needs_local_ip_info(spawn: Spawner) -> None:
    peer = spawn()
    _up(peer, D_ID)
    peer.attempt(_link_without_local_info).expect(INVALID, "append_local_ip_info")


def _link_without_local_info(w: World) -> Any:
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = P_ID
    info.append_remote_ip_info("127.0.0.1", 9)
    return w.dist.link_clusters([info], 1000)


@pytest.mark.rule("3.35", "4.19")
def test_local_comm_res_makes_local_ip_info_needless(spawn: Spawner) -> None:
    p, d = spawn(), spawn()
    address = _up(p, P_ID, "B", listen="127.0.0.1:0")
    values = {"llm.LocalCommRes": ""}
    d.call(actors.up, D_ID, values)
    assert d.call(_link_bare, address) == (SUCCESS, [SUCCESS])


def _link_bare(w: World, address: tuple[str, int]) -> Any:
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = P_ID
    info.append_remote_ip_info(*address)
    return w.dist.link_clusters([info], 3000)


@pytest.mark.rule("4.31", "5.4")
def test_the_two_sides_must_have_one_mode(spawn: Spawner) -> None:
    p, d = spawn(), spawn()
    address = _up(p, P_ID, "A", listen="127.0.0.1:0")
    _up(d, D_ID, "B")
    assert d.call(actors.link, [(P_ID, address)]) == (INVALID, [INVALID])
    assert d.call(actors.links) == [] and p.call(actors.links) == []


@pytest.mark.rule("4.34")
def test_transports_without_overlap_fail_with_the_reason(spawn: Spawner) -> None:
    p, d = spawn(), spawn()
    address = _up(p, P_ID, "A", "tcp", "127.0.0.1:0")
    _up(d, D_ID, "A", "local")
    d.call(actors.watch_logs)
    assert d.call(actors.link, [(P_ID, address)]) == (FAILED, [FAILED])
    (record,) = d.call(actors.log_records, "WARNING")
    assert "local" in record[2] and "tcp" in record[2]


@pytest.mark.rule("4.33")
def test_another_live_process_with_the_same_id(spawn: Spawner) -> None:
    p, d, other = spawn(), spawn(), spawn()
    address = _up(p, P_ID, listen="127.0.0.1:0")
    _up(d, D_ID)
    _up(other, D_ID)
    assert d.call(actors.link, [(P_ID, address)]) == (SUCCESS, [SUCCESS])
    assert other.call(actors.link, [(P_ID, address)]) == (FAILED, [FAILED])
    d.call(actors.check_link, P_ID)
    assert [i for i, _, _ in p.call(actors.links)] == [D_ID]


@pytest.mark.rule("4.35")
def test_ids_must_be_unique(spawn: Spawner) -> None:
    p, d = spawn(), spawn()
    address = _up(p, 5, listen="127.0.0.1:0")
    _up(d, 5)
    d.call(actors.watch_logs)
    assert d.call(actors.link, [(5, address)]) == (FAILED, [FAILED])
    (record,) = d.call(actors.log_records, "WARNING")
    assert "unique" in record[2]


@pytest.mark.rule("4.36")
def test_a_link_to_myself(pair: Pair) -> None:
    mode, backend = pair.combo.mode, pair.combo.backend
    address = _up(pair.d, D_ID, mode, backend, "127.0.0.1:0")
    assert pair.d.call(actors.link, [(D_ID, address)]) == (SUCCESS, [SUCCESS])
    pair.d.call(actors.blocks_cache, "src", seed=3, model_id=0)
    pair.d.call(actors.blocks_cache, "dst", model_id=1)
    pair.pull_blocks([0], [0], of_model(0, D_ID)).expect(INVALID)
    pair.unchanged()
    if mode == "B":
        pair.d.call(actors.push_blocks, of_model(1, D_ID), "src", [1], [2])
        pieces = [([1024], [2048], 1024)]
        assert not pair.d.call(actors.compare, "dst", seed=3, src_tensor_nbytes=8192, pieces=pieces)


@pytest.mark.rule("4.12", "R.10")
def test_a_link_serves_both_directions(pair: Pair) -> None:
    pair.up()
    pair.d.call(actors.blocks_cache, "src", seed=3, model_id=0)
    pair.p.call(actors.blocks_cache, "dst")
    pair.p.call(actors.pull_blocks, of_model(0, D_ID), "dst", [1], [2])
    pieces = [([1024], [2048], 1024)]
    assert not pair.p.call(actors.compare, "dst", seed=3, src_tensor_nbytes=8192, pieces=pieces)


@pytest.mark.rule("4.21")
def test_many_links_of_one_call(spawn: Spawner) -> None:
    d, others = spawn(), [spawn() for _ in range(3)]
    _up(d, D_ID)
    remotes = [(10 + n, _up(peer, 10 + n, listen="127.0.0.1:0")) for n, peer in enumerate(others)]
    assert d.call(actors.link, remotes) == (SUCCESS, [SUCCESS] * 3)
    assert sorted(i for i, _, _ in d.call(actors.links)) == [10, 11, 12]


@pytest.mark.rule("4.42")
def test_unlink_tells_the_peer(pair: Pair) -> None:
    pair.up()
    assert pair.d.call(actors.unlink, [P_ID]) == (SUCCESS, [SUCCESS])
    assert wait_until(lambda: pair.p.call(actors.links) == [], AT_ONCE)
    pair.d.attempt(actors.check_link, P_ID).expect(NOT_YET, P_ID)
    pair.link()


@pytest.mark.rule("4.39")
def test_unlink_of_an_unknown_cluster(spawn: Spawner) -> None:
    peer = spawn()
    _up(peer, D_ID)
    assert peer.call(actors.unlink, [99]) == (SUCCESS, [SUCCESS])


@pytest.mark.rule("4.40")
def test_forced_unlink_drops_my_side(pair: Pair) -> None:
    pair.up()
    outcome = pair.d.attempt(actors.unlink, [P_ID], 3000, True)
    assert outcome.value == (SUCCESS, [SUCCESS])
    assert outcome.took.within(AT_ONCE)
    assert pair.d.call(actors.links) == []


@pytest.mark.rule("4.74", "4.75", "4.77")
@TWO
def test_check_link_status_says_what_is_wrong(pair: Pair) -> None:
    pair.up(timeout_ms=1000)
    pair.d.call(actors.check_link, P_ID)
    pair.d.attempt(actors.check_link, 42).expect(NOT_YET, 42)
    pair.p.stop()
    outcome = pair.d.attempt(actors.check_link, P_ID)
    pair.p.cont()
    outcome.expect(TIMEOUT, P_ID)
    assert outcome.took.about(1.0)
    pair.d.call(actors.check_link, P_ID)


@pytest.mark.rule("4.85", "4.91", "4.93")
def test_a_killed_peer_is_noticed_at_once(pair: Pair) -> None:
    pair.up()
    pair.destination()
    pair.p.kill()
    assert wait_until(lambda: pair.d.call(actors.links) == [], AT_ONCE)
    outcome = pair.pull_blocks([0], [0])
    outcome.expect(NOT_YET, P_ID)
    assert outcome.took.within(AT_ONCE)


@pytest.mark.rule("4.96")
def test_links_says_which_transport_and_why(pair: Pair) -> None:
    pair.up()
    fields = pair.d.call(_link_fields)
    assert fields["cluster_id"] == P_ID
    assert fields["transport"] == pair.combo.backend
    assert f"{pair.address[0]}:{pair.address[1]}" in fields["address"]
    assert fields["reasons"]
    assert "up" in fields["state"].lower()


def _link_fields(w: World) -> dict[str, str]:
    (info,) = w.dist.links()
    names = ("address", "reasons", "state", "since", "bytes_in", "bytes_out")
    return {
        "cluster_id": info.cluster_id,
        "transport": info.transport,
        **{n: str(getattr(info, n)) for n in names},
    }


@pytest.mark.rule("1.38", "3.7", "3.11")
def test_use_before_init_and_after_finalize(spawn: Spawner) -> None:
    peer = spawn()
    before, after, again = peer.call(_life)
    assert before[0] == "RuntimeError" or before[1] is not None
    assert after == ("EngineFinalizedError", LLMStatusCode.LLM_ENGINE_FINALIZED)
    assert again == 1


def _life(w: World) -> Any:
    def failure() -> tuple[str, Any]:
        try:
            w.dist.check_link_status(1)
        except RuntimeError as exc:
            code = exc.status_code if isinstance(exc, LLMException) else None
            return type(exc).__name__, code
        raise AssertionError("no error")

    w.dist = dd.LLMDataDist(dd.LLMRole.PROMPT, 1)
    before = failure()
    w.dist.init(actors.options())
    assert actors.blocks_cache(w, "one") == 1
    w.dist.finalize()
    w.dist.finalize()
    after = failure()
    w.dist.init(actors.options())
    return before, after, actors.blocks_cache(w, "two")
