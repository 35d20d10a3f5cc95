"""Two LinkServices over loopback: who gets linked, who is refused, and when."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from llm_datadist._link.link import Link
from llm_datadist._link.seam import Address, Target, Unusable
from llm_datadist._wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Refused,
    Welcome,
)
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support.links import Engine
from tests.support.raw_links import RawPeer, hello, identity, listening_socket, swallowing_address

OK = LLMStatusCode.LLM_SUCCESS
ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    with Engine(1) as a, Engine(2) as b:
        yield a, b


def link_of(engine: Engine, cluster_id: int) -> Link:
    link = engine.service.get(cluster_id)
    assert link is not None
    return link


@pytest.mark.rule("4.21")
def test_both_sides_are_up_when_dial_returns(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    for _ in range(20):
        assert a.service.dial([b.target], 2) == [OK]
        mine, theirs = link_of(a, 2), link_of(b, 1)
        assert (mine.state, theirs.state) == ("up", "up")
        assert mine.token == theirs.token and len(mine.token) == 32
        assert (mine.dialled, theirs.dialled) == (True, False)
        assert mine.dialled_address == b.address and theirs.dialled_address is None
        assert mine.reads_by == theirs.peer_reads_by == ("by-auto",)
        assert mine.context == mine.token
        assert not a.notes.shown and not b.notes.shown, "hidden when both are up"
        a.service.drop(mine, "next round", tell=True)
        assert b.notes.wait_for(lambda: b.service.links() == [])
    assert len(a.notes.ups) == len(b.notes.ups) == 20
    assert [reason for _, reason in b.notes.downs][-1] == "the peer dropped the link: next round"


def test_l5_the_same_link_is_asked_for_again(
    pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    caplog.clear()
    assert a.service.dial([b.target], 2) == [ALREADY]
    assert b.service.dial([a.target], 2) == [OK], "the peer dialled before: one link serves both"
    assert b.service.dial([a.target], 2) == [ALREADY]
    assert len(a.service.links()) == len(b.service.links()) == 1
    assert link_of(b, 1).dialled
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.rule("4.11")
def test_one_cluster_twice_in_a_call_and_from_many_threads(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert a.service.dial([b.target, b.target], 2) == [OK, ALREADY]
    a.service.drop(link_of(a, 2), "again", tell=True)
    codes: list[LLMStatusCode] = []
    threads = [threading.Thread(target=lambda: codes.extend(a.service.dial([b.target], 5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [OK] + [ALREADY] * 7


@pytest.mark.rule("4.16")
def test_a_later_dial_tries_itself_when_the_first_has_failed(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    wrong = Target(2, Address("127.0.0.1", 1))
    assert a.service.dial([wrong], 2) == [FAILED] and a.service.link_error(2) is not None
    assert a.service.dial([wrong, b.target], 2) == [FAILED, OK]
    assert a.service.link_error(2) is None, "kept until the next success"


def test_l6_both_sides_dial_at_the_same_moment(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    for round_number in range(50):
        barrier = threading.Barrier(2)
        codes: dict[int, list[LLMStatusCode]] = {}

        def dial(me: Engine, other: Engine) -> None:
            barrier.wait()  # noqa: B023 - joined within the round
            codes[me.id] = me.service.dial([other.target], 3)  # noqa: B023

        threads = [threading.Thread(target=dial, args=ends) for ends in ((a, b), (b, a))]
        watch = Stopwatch()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == {1: [OK], 2: [OK]}
        assert watch.within(2.5)
        mine, theirs = link_of(a, 2), link_of(b, 1)
        assert mine.token == theirs.token and mine.dialled and theirs.dialled
        a.service.ping(mine, time.monotonic() + 2)
        side, link = ((a, mine), (b, theirs))[round_number % 2]
        side.service.drop(link, "next", tell=True)
    assert a.notes.wait_for(lambda: a.service.links() == [] == b.service.links())
    assert a.notes.prepared == a.notes.discarded + len(a.notes.ups)
    assert b.notes.prepared == b.notes.discarded + len(b.notes.ups)


def test_l4_another_engine_answers(pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair
    watch = Stopwatch()
    assert a.service.dial([Target(5, b.address)], 3) == [FAILED]
    assert watch.within(0.5)
    text = a.service.link_error(5) or ""
    assert "5" in text and "cluster 2" in text and str(b.address) in text
    assert [record.levelname for record in caplog.records if text in record.getMessage()] == ["WARNING"]
    assert sum("refused the link" in record.getMessage() for record in caplog.records) == 1, "at the acceptor"
    assert a.service.links() == [] == b.service.links()
    assert a.service.dial([b.target], 2) == [OK] and a.service.link_error(2) is None


@pytest.mark.rule("4.27")
def test_l4_an_answer_with_another_id_is_refused_by_the_dialler() -> None:
    with Engine(1) as a, listening_socket() as (sock, address):

        def answer() -> None:
            with RawPeer(sock=sock.accept()[0]) as peer:
                peer.hear()
                peer.say(Welcome(identity=identity(7), seed=b"t" * 16, challenge=b"c" * 16))
                heard.append(peer.hear())

        heard: list[Message | None] = []
        thread = threading.Thread(target=answer)
        thread.start()
        assert a.service.dial([Target(5, address)], 3) == [FAILED]
        thread.join()
        assert isinstance(heard[0], Refused)
        assert "cluster 5" in (a.service.link_error(5) or "") and "cluster 7" in (
            a.service.link_error(5) or ""
        )


@pytest.mark.rule("S.21")
def test_g16_an_answer_that_says_it_is_me_must_come_from_here() -> None:
    """Who is dialled by a cluster as itself hands back what it was told."""
    with Engine(1) as a, listening_socket() as (sock, address):

        def answer() -> None:
            with RawPeer(sock=sock.accept()[0]) as peer:
                heard = peer.hear()
                assert isinstance(heard, Hello)
                peer.say(Welcome(identity=heard.identity, seed=b"t" * 16, challenge=b"c" * 16))
                answers.append(peer.hear())

        answers: list[Message | None] = []
        thread = threading.Thread(target=answer)
        thread.start()
        assert a.service.dial([Target(1, address)], 3) == [FAILED]
        thread.join()
        assert isinstance(answers[0], Refused)
        assert "this very process" in (a.service.link_error(1) or "")
        assert not a.notes.prepared and not a.notes.shown
        assert a.service.dial([a.target], 3) == [OK]


def test_sides_that_differ_in_mode_are_refused() -> None:
    with Engine(1) as a, Engine(2, accessible=True) as b:
        assert a.service.dial([b.target], 2) == [LLMStatusCode.LLM_PARAM_INVALID]
        assert "enable_remote_cache_accessible" in (a.service.link_error(2) or "")


@pytest.mark.rule("4.28")
def test_versions_without_overlap_are_refused() -> None:
    with Engine(1) as a, RawPeer(a.address) as peer:
        peer.say(msgspec.structs.replace(hello(1, identity()), version=PROTOCOL_VERSION + 1))
        refused = peer.hear()
        assert isinstance(refused, Refused) and refused.code == FAILED
        assert str(PROTOCOL_VERSION) in refused.text and str(PROTOCOL_VERSION + 1) in refused.text


def test_a_link_to_myself() -> None:
    with Engine(1) as a:
        assert a.service.dial([a.target], 2) == [OK]
        assert a.service.dial([a.target], 2) == [ALREADY]
        assert len(a.service.links()) == 1 and len(a.notes.ups) == 2
        assert all(link.is_self for link in a.notes.ups)
        assert sorted(link.accepted for link in a.notes.ups) == [False, True]
        assert not link_of(a, 1).accepted
        a.service.ping(link_of(a, 1), time.monotonic() + 2)
        a.service.drop(link_of(a, 1), "enough", tell=True)
        assert a.notes.wait_for(lambda: len(a.notes.downs) == 2) and a.service.links() == []


def test_my_cluster_id_in_another_process_is_refused() -> None:
    with Engine(1) as a, Engine(1) as b:
        assert a.service.dial([b.target], 2) == [FAILED]
        assert "must be unique" in (a.service.link_error(1) or "")


@pytest.mark.parametrize("refusing_side", [0, 1])
def test_what_the_engine_of_either_side_refuses(pair: tuple[Engine, Engine], refusing_side: int) -> None:
    a, b = pair
    pair[refusing_side].notes.refuse = Unusable(LLMStatusCode.LLM_LINK_FAILED, "no transport: because")
    assert a.service.dial([b.target], 2) == [FAILED]
    assert "no transport: because" in (a.service.link_error(2) or "")
    other = pair[1 - refusing_side].notes
    assert other.wait_for(lambda: other.prepared == other.discarded)
    assert a.service.links() == [] == b.service.links()


@pytest.mark.rule("4.10")
def test_attempts_are_counted_and_the_reason_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(1, retry_count=3) as a:
        with listening_socket() as (_, address):
            pass
        watch = Stopwatch()
        assert a.service.dial([Target(2, address)], 5) == [FAILED]
        assert watch.elapsed >= 0.3 and watch.within(2.0), "100 ms and 200 ms of back-off"
        assert "Connection refused" in (a.service.link_error(2) or "")
        assert len([r for r in caplog.records if r.name == "llm_datadist.link" and r.levelno >= 30]) == 1


@pytest.mark.rule("4.10")
def test_a_peer_that_comes_late_is_met_by_a_later_attempt() -> None:
    with listening_socket() as (_, address):
        pass
    with Engine(1, retry_count=100) as a:
        codes: list[LLMStatusCode] = []
        thread = threading.Thread(target=lambda: codes.extend(a.service.dial([Target(2, address)], 10)))
        thread.start()
        with Engine(2, port=address.port):
            thread.join()
            assert codes == [OK]


def test_t1_addresses_that_never_answer(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    with Engine(3) as c, swallowing_address() as swallowing, listening_socket() as (_, silent):
        assert a.service.dial([c.target], 2) == [OK]
        fds = len(os.listdir("/proc/self/fd"))
        slowest, ended = [0.0], threading.Event()

        def ping() -> None:
            while not ended.is_set():
                began = time.monotonic()
                a.service.ping(link_of(a, 3), began + 5)
                slowest[0] = max(slowest[0], time.monotonic() - began)

        pinging = threading.Thread(target=ping)
        pinging.start()
        watch = Stopwatch()
        codes = a.service.dial([b.target, Target(8, swallowing), Target(9, silent)], 1.0)
        took = watch.took()
        ended.set()
        pinging.join()
        assert codes == [OK, TIMEOUT, TIMEOUT]
        assert took.elapsed >= 0.8 and took.within(1.2)
        assert Taken(slowest[0], took.stalled).within(0.5)
        a.service.drop(link_of(a, 2), "count", tell=True)
        assert b.notes.wait_for(lambda: b.service.links() == [])
        assert len(os.listdir("/proc/self/fd")) == fds


def test_an_address_that_does_not_resolve() -> None:
    with Engine(1) as a:
        assert a.service.dial([Target(2, Address("no.such.host.invalid", 5))], 5) == [FAILED]
        assert "cannot resolve 'no.such.host.invalid'" in (a.service.link_error(2) or "")
        assert a.service.dial([Target(2, Address("a" * 70 + ".x", 5))], 5) == [FAILED]


@pytest.mark.parametrize(
    ("listen", "dial"),
    [
        ("127.0.0.1", "localhost"),
        ("localhost", "localhost"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),
        ("", "127.0.0.1"),
    ],
)
def test_n1_forms_of_address(listen: str, dial: str) -> None:
    with Engine(1) as a, Engine(2, listen=listen) as b:
        assert a.service.dial([Target(2, Address(dial, b.address.port))], 3) == [OK]
        assert "ffff" not in link_of(b, 1).address


def test_n2_a_port_in_use_and_a_foreign_address() -> None:
    with Engine(1) as a:
        for host, port in ((a.address.host, a.address.port), ("192.0.2.1", 0), ("no.such.host.invalid", 0)):
            with pytest.raises(LLMException, match=host) as caught:
                Engine(2, listen=host, port=port)
            assert caught.value.status_code == LLMStatusCode.LLM_FAILED
