"""The policy of links, one decision at a time. (All orders together: tests/property/test_link_policy.py.)"""

from __future__ import annotations

import msgspec
import pytest

from llm_datadist._link import table as t
from llm_datadist._wire.messages import PROTOCOL_VERSION, Hello, Identity
from llm_datadist.status import LLMStatusCode
from tests.support.two_tables import World, identity

OK = LLMStatusCode.LLM_SUCCESS
ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT


def hello(peer: Identity, target_id: int, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version=version, target_id=target_id, identity=peer, challenge=b"")


def table(cluster_id: int = 1, retry_count: int = 1) -> t.LinkTable:
    return t.LinkTable(identity(cluster_id), retry_count)


def linked(cluster_id: int = 1, peer_id: int = 2) -> t.LinkTable:
    """A table whose connection 10 is an accepted link."""
    tab = table(cluster_id)
    assert tab.hello(10, hello(identity(peer_id), cluster_id)) == [t.Accept(10)]
    assert tab.confirmed(10) == [t.Establish(10)]
    return tab


def test_a_dial_that_goes_well() -> None:
    tab = table()
    assert tab.dial(1, 2) == [t.Connect(1)]
    assert tab.check_welcome(1, identity(2)) is None
    assert tab.welcomed(1, 10) == [t.Confirm(10)]
    assert tab.established(1, 10, identity(2)) == [t.Establish(10), t.Finish(1, OK, "")]


def test_attempts_back_off_and_end() -> None:
    tab = table(retry_count=3)
    tab.dial(1, 2)
    assert tab.connect_failed(1, "x") == [t.Retry(1, 0.1)]
    assert tab.retry_due(1) == [t.Connect(1)]
    assert tab.connect_failed(1, "x") == [t.Retry(1, 0.2)]
    assert tab.retry_due(1) == [t.Connect(1)]
    assert tab.connect_failed(1, "why") == [t.Finish(1, FAILED, "why")]
    assert not tab._peers and not tab._dials


def test_a_refusal_is_final_even_with_attempts_left() -> None:
    tab = table(retry_count=3)
    tab.dial(1, 2)
    assert tab.refused(1, LLMStatusCode.LLM_PARAM_INVALID, "mode", "") == [
        t.Finish(1, LLMStatusCode.LLM_PARAM_INVALID, "mode")
    ]


def test_refused_as_already_it_waits_for_the_link_that_is_being_made() -> None:
    tab = table(2)
    tab.dial(1, 1)
    assert tab.refused(1, FAILED, "", t.ALREADY) == [t.Retry(1, t.REDIAL_S)]
    tab.hello(10, hello(identity(1), 2))
    assert tab.confirmed(10) == [t.Establish(10), t.Abandon(1), t.Finish(1, OK, "")]


def test_a_dial_of_a_linked_cluster_asks_whether_the_link_lives() -> None:
    tab = linked()
    assert tab.dial(1, 2) == [t.Probe(1, 10, 1)]
    assert tab.probe_done(1, True) == [t.Finish(1, OK, "")]
    assert tab.dial(2, 2) == [t.Probe(2, 10, 2)]
    assert tab.probe_done(2, True) == [t.Finish(2, ALREADY, "")]
    assert tab.probe_done(2, False) == [], "a probe ends once"


def test_a_link_that_does_not_answer_is_replaced_only_by_one_that_is_up() -> None:
    tab = linked()
    tab.dial(1, 2)
    assert tab.probe_done(1, False) == [t.Connect(1)]
    assert tab.connect_failed(1, "no") == [t.Finish(1, FAILED, "no")]
    tab.dial(2, 2)
    tab.probe_done(2, False)
    assert tab.welcomed(2, 20) == [t.Confirm(20)]
    drop, establish, finish = tab.established(2, 20, identity(2))
    assert isinstance(drop, t.Drop) and drop.conn == 10
    assert (establish, finish) == (t.Establish(20), t.Finish(2, OK, ""))


def test_later_dials_wait_and_share_the_fate_or_try_themselves() -> None:
    tab = table()
    tab.dial(1, 2)
    assert tab.dial(2, 2) == [] and tab.dial(3, 2) == []
    assert tab.connect_failed(1, "no") == [t.Finish(1, FAILED, "no"), t.Connect(2)]
    assert tab.expired(3, TIMEOUT, "time") == [t.Finish(3, TIMEOUT, "time")]
    tab.dial(4, 2)
    tab.welcomed(2, 20)
    assert tab.established(2, 20, identity(2)) == [
        t.Establish(20),
        t.Finish(2, OK, ""),
        t.Finish(4, ALREADY, ""),
    ]


def test_a_dial_that_runs_out_of_time_leaves_nothing() -> None:
    tab = table()
    tab.dial(1, 2)
    assert tab.expired(1, TIMEOUT, "time") == [t.Abandon(1), t.Finish(1, TIMEOUT, "time")]
    assert tab.expired(1, TIMEOUT, "time") == []
    assert not tab._peers and not tab._dials
    assert tab.check_welcome(1, identity(2)) is not None
    assert isinstance(tab.welcomed(1, 10)[0], t.Refuse)
    assert isinstance(tab.established(1, 10, identity(2))[0], t.Drop)
    assert tab.connect_failed(1, "x") == tab.retry_due(1) == tab.refused(1, FAILED, "", "") == []


@pytest.mark.rule("4.28")
@pytest.mark.parametrize(
    ("peer", "target_id", "version", "code", "words"),
    [
        (identity(2), 5, PROTOCOL_VERSION, FAILED, ["cluster 5", "cluster 1"]),
        (identity(2), 1, PROTOCOL_VERSION + 1, FAILED, [str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1)]),
        (identity(1, life=7), 1, PROTOCOL_VERSION, FAILED, ["unique", "1"]),
        (
            identity(2, accessible=True),
            1,
            PROTOCOL_VERSION,
            LLMStatusCode.LLM_PARAM_INVALID,
            ["enable_remote_cache_accessible"],
        ),
    ],
    ids=["id", "version", "own id", "mode"],
)
def test_a_hello_that_does_not_fit(
    peer: Identity, target_id: int, version: int, code: LLMStatusCode, words: list[str]
) -> None:
    tab = table()
    (refuse,) = tab.hello(10, hello(peer, target_id, version))
    assert isinstance(refuse, t.Refuse) and refuse.code == code and refuse.kind == ""
    assert all(word in refuse.text for word in words)
    assert not tab._accepted


def test_a_welcome_of_another_cluster_names_both() -> None:
    tab = table()
    tab.dial(1, 5)
    code, text = tab.check_welcome(1, identity(7)) or (OK, "")
    assert code == FAILED and "cluster 5" in text and "cluster 7" in text


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_hello_for_a_linked_cluster(answered: bool, same: bool) -> None:
    tab = linked()
    assert tab.hello(20, hello(identity(2, life=0 if same else 1), 1)) == [t.Probe(1, 10, None)]
    (action,) = tab.probe_done(1, answered)
    if not answered:
        assert action == t.Accept(20)
        drop, establish = tab.confirmed(20)
        assert isinstance(drop, t.Drop) and drop.conn == 10 and establish == t.Establish(20)
        return
    assert isinstance(action, t.Refuse)
    assert action.kind == (t.ALREADY if same else "")
    assert same or "another live process holds cluster id 2" in action.text


def test_a_hello_whose_probe_finds_a_newer_link() -> None:
    tab = linked()
    tab.hello(20, hello(identity(2), 1))
    tab.closed(10)
    tab.hello(30, hello(identity(2), 1))
    tab.confirmed(30)
    (action,) = tab.probe_done(1, False)
    assert isinstance(action, t.Refuse) and action.kind == t.ALREADY


def test_a_hello_that_is_closed_while_the_old_link_is_asked() -> None:
    tab = linked()
    tab.hello(20, hello(identity(2), 1))
    tab.closed(20)
    assert tab.probe_done(1, False) == []


def test_the_authority_commits_one_connection() -> None:
    tab = table(1)
    tab.dial(1, 2)
    tab.welcomed(1, 10)
    tab.hello(20, hello(identity(2), 1))
    (refuse,) = tab.confirmed(20)
    assert isinstance(refuse, t.Refuse) and refuse.kind == t.ALREADY
    assert tab.established(1, 10, identity(2)) == [t.Establish(10), t.Finish(1, OK, "")]
    tab.hello(30, hello(identity(2), 1))


def test_the_other_side_takes_what_the_authority_commits() -> None:
    tab = table(2)
    tab.dial(1, 1)
    tab.welcomed(1, 10)
    tab.hello(20, hello(identity(1), 2))
    assert tab.confirmed(20) == [t.Establish(20), t.Abandon(1), t.Finish(1, OK, "")]


def test_an_uncommitted_connection_of_the_authority_makes_room() -> None:
    tab = table(1, retry_count=2)
    tab.dial(1, 2)
    tab.welcomed(1, 10)
    assert tab.connect_failed(1, "lost before Established") == [t.Retry(1, 0.1)]
    tab.hello(20, hello(identity(2), 1))
    assert tab.confirmed(20) == [t.Establish(20), t.Abandon(1), t.Finish(1, OK, "")]


def test_a_link_to_myself_has_one_end_in_the_table() -> None:
    tab = table(1)
    tab.dial(1, 1)
    assert tab.hello(20, hello(identity(1), 1), from_here=True) == [t.Accept(20)]
    assert tab.check_welcome(1, identity(1), from_here=True) is None
    tab.welcomed(1, 10)
    assert tab.confirmed(20) == [t.Establish(20, hidden=True)]
    assert tab.established(1, 10, identity(1)) == [t.Establish(10), t.Finish(1, OK, "")]
    assert tab.dial(2, 1) == [t.Probe(1, 10, 2)]


@pytest.mark.parametrize(
    ("cluster_id", "from_here"),
    [(1, False), (2, False), (2, True)],
    ids=["me", "my life", "my life from here"],
)
@pytest.mark.rule("S.21")
def test_g16_who_says_that_it_is_me_must_be_me(cluster_id: int, from_here: bool) -> None:
    tab = table(1)
    peer = msgspec.structs.replace(identity(1), cluster_id=cluster_id)
    (refuse,) = tab.hello(10, hello(peer, 1), from_here=from_here)
    assert isinstance(refuse, t.Refuse) and refuse.code == FAILED and "this very process" in refuse.text
    tab.dial(1, cluster_id)
    wrong = tab.check_welcome(1, peer, from_here=from_here)
    assert wrong is not None and wrong[0] == FAILED and "this very process" in wrong[1]
    assert not tab._accepted


def test_a_closed_link_leaves_nothing() -> None:
    tab = linked()
    tab.closed(10)
    assert not tab._peers
    assert tab.dial(1, 2) == [t.Connect(1)]


def test_a_confirm_that_nobody_knows_is_dropped() -> None:
    assert isinstance(table().confirmed(99)[0], t.Drop)


@pytest.mark.parametrize("authority_first", [True, False])
def test_the_simulated_network_links_two_tables(authority_first: bool) -> None:
    world = World()
    world.nodes[0 if authority_first else 1].dial(1, 2 if authority_first else 1)
    world.settle()
    assert world.nodes[0].link == world.nodes[1].link == 1


def test_identities_are_compared_by_instance() -> None:
    assert msgspec.structs.replace(identity(1), instance=b"x" * 16) != identity(1)
