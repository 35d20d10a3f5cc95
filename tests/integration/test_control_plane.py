"""Two LinkServices over loopback: being dialled, messages, liveness, bad peers, the end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from llm_datadist._link.link import Link, LinkLost
from llm_datadist._link.seam import Target
from llm_datadist._wire.framing import encode
from llm_datadist._wire.messages import (
    PROTOCOL_VERSION,
    Confirm,
    DataHello,
    Done,
    NeedConnections,
    Ping,
    Unlink,
    Welcome,
)
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.links import Engine
from tests.support.raw_links import RawPeer, hello, identity, listening_socket
from tests.support.world import wait_until

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


def test_another_live_process_holds_that_id(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert b.service.dial([a.target], 2) == [OK]
    with Engine(2) as impostor:
        assert impostor.service.dial([a.target], 3) == [FAILED]
        assert "another live process holds cluster id 2" in (impostor.service.link_error(1) or "")
    assert link_of(a, 2).state == "up"


@pytest.mark.rule("4.32")
def test_l7_an_old_link_that_does_not_answer_is_replaced() -> None:
    with Engine(1) as a, RawPeer(a.address) as old:
        old.link(1, 2)
        gone = link_of(a, 2)
        with Engine(2) as b:
            watch = Stopwatch()
            assert b.service.dial([a.target], 3) == [OK]
            assert watch.within(2.0), "one second for the ping"
            assert gone.state == "down" and "replaced" in (gone.down_reason or "")
            assert link_of(a, 2) is not gone
            assert [link for link, _ in a.notes.downs] == [gone]


def test_l7_a_restarted_peer_links_at_once() -> None:
    with Engine(1) as a:
        for _ in range(20):
            with Engine(2) as b:
                assert b.service.dial([a.target], 2) == [OK]
        with Engine(2) as b:
            assert a.service.dial([b.target], 2) == [OK]


def test_a_data_connection_goes_to_the_handler() -> None:
    with Engine(1) as a, RawPeer(a.address) as peer:
        hello = DataHello(version=PROTOCOL_VERSION, link_token=b"t" * 16, dialler_reads=True)
        peer.sock.sendall(b"".join(bytes(chunk) for chunk in encode(hello)) + b"first bytes")
        assert a.notes.wait_for(lambda: bool(a.notes.data))
        sock, got, leftover = a.notes.data[0]
        assert got == hello and leftover == b"first bytes" and not sock.getblocking()
        peer.sock.sendall(b"more")
        sock.settimeout(2)
        assert sock.recv(10) == b"more", "nobody else reads it"
        sock.close()


def test_calls_and_late_answers(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    link = link_of(a, 2)
    block = os.urandom(40 << 20)
    frame = link.call(Unlink(id=link.next_id(), time_left_ms=1), [block]).wait(time.monotonic() + 10)
    assert frame.attachments == (block,)
    b.notes.answers = False
    pending = link.call(Unlink(id=link.next_id(), time_left_ms=1))
    with pytest.raises(TimeoutError):
        pending.wait(time.monotonic() + 0.05)
    pending.close()
    b.notes.answers = True
    late, _ = b.notes.frames[-1]
    ended: list[bool] = []
    pending = link.call(Unlink(id=link.next_id(), time_left_ms=1))
    pending.add_done_callback(lambda p: ended.append(p.answered))
    pending.wait(time.monotonic() + 5)
    late.send(Done(id=999, code=3))
    assert a.notes.wait_for(lambda: bool(a.notes.frames))
    assert a.notes.frames[0][1].message == Done(id=999, code=3), "nobody waits for it: the handler gets it"
    assert ended == [True]


@pytest.mark.rule("4.85")
def test_what_waits_fails_when_the_link_goes_down(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    link = link_of(a, 2)
    b.notes.answers = False
    pending = link.call(Unlink(id=link.next_id(), time_left_ms=1))
    ended = threading.Event()
    pending.add_done_callback(lambda p: ended.set())
    b.service.drop(link_of(b, 1), "had enough", tell=True)
    with pytest.raises(LinkLost, match="had enough"):
        pending.wait(time.monotonic() + 5)
    assert ended.wait(5)
    with pytest.raises(LinkLost):
        link.post(Ping(id=1))
    with pytest.raises(LinkLost):
        link.call(Ping(id=1))


def test_the_first_words_of_on_up_come_first(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    a.notes.first_words = b.notes.first_words = lambda link: link.post(Unlink(id=77, time_left_ms=0))
    assert a.service.dial([b.target], 2) == [OK]
    for side in pair:
        assert side.notes.wait_for(lambda side=side: bool(side.notes.frames))  # type: ignore[misc]
        assert side.notes.frames[0][1].message == Unlink(id=77, time_left_ms=0)


def test_dial_returns_only_when_on_up_of_the_peer_has_ended(pair: tuple[Engine, Engine]) -> None:
    a, b = pair

    def slow(link: Link) -> None:
        link.flush()
        threading.Event().wait(0.2)

    b.notes.first_words = slow
    assert a.service.dial([b.target], 2) == [OK]
    assert b.service.get(1) is not None


def test_a_posted_message_leaves_with_the_next_turn_of_the_loop() -> None:
    with Engine(1, heartbeat_ms=60000) as a, Engine(2) as b:
        assert a.service.dial([b.target], 2) == [OK]
        link_of(a, 2).post(Unlink(id=5, time_left_ms=0))
        a.service.call_soon(lambda: None)
        assert b.notes.wait_for(lambda: bool(b.notes.frames))


def test_connections_asked_for_in_the_handshake_are_asked_for_when_up(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    original = b.notes.prepare

    def prepare(*args: object) -> object:
        result = original(*args)  # type: ignore[arg-type]
        b.notes.asks[-1](3)
        return result

    b.notes.prepare = prepare  # type: ignore[method-assign,assignment]
    assert a.service.dial([b.target], 2) == [OK]
    assert a.notes.wait_for(lambda: bool(a.notes.frames))
    assert a.notes.frames[0][1].message == NeedConnections(count=3)
    b.notes.asks[-1](2)
    assert a.notes.wait_for(lambda: len(a.notes.frames) == 2)
    assert a.notes.addresses == [b.address] and b.notes.addresses == [None]


def test_an_exception_of_the_handler_costs_only_its_connection(
    pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    with Engine(3) as c:
        assert a.service.dial([b.target, c.target], 2) == [OK, OK]

        def fail(*args: object) -> None:
            raise ZeroDivisionError("in the handler")

        a.notes.on_message = fail  # type: ignore[method-assign]
        link_of(b, 1).send(Unlink(id=1, time_left_ms=0))
        assert a.notes.wait_for(lambda: len(a.notes.downs) == 1)
        assert a.service.get(2) is None and link_of(a, 3).state == "up"
        assert any(record.exc_info for record in caplog.records), "with its traceback"
        a.notes.on_up = fail  # type: ignore[method-assign]
        assert a.service.dial([b.target], 2) == [FAILED]
        del a.notes.on_up
        assert a.service.dial([b.target], 2) == [OK]
        a.service.ping(link_of(a, 3), time.monotonic() + 2)


@pytest.mark.rule("4.86", "4.92")
def test_t2_silent_then_down_and_others_do_not_notice() -> None:
    options = {"heartbeat_ms": 50, "link_timeout_ms": 600}
    with Engine(1, **options) as a, Engine(2) as b, RawPeer(a.address) as peer:
        assert a.service.dial([b.target], 2) == [OK]
        peer.link(1, 9, **options)
        link = link_of(a, 9)
        pending = link.call(Ping(id=link.next_id()))
        watch = Stopwatch()
        with pytest.raises(LinkLost, match="heard nothing"):
            pending.wait(watch.began + 5)
        assert watch.elapsed >= 0.4 and watch.within(1.2)
        assert a.service.get(9) is None and link_of(a, 2).state == "up"


@pytest.mark.rule("4.84")
def test_a_silent_link_is_up_again_with_the_first_byte() -> None:
    with Engine(1) as a, RawPeer(a.address) as peer:
        peer.link(1, 9, heartbeat_ms=30)
        link = link_of(a, 9)
        assert wait_until(lambda: link.state == "silent") and a.service.get(9) is link
        peer.say(Unlink(id=1, time_left_ms=0))
        assert a.notes.wait_for(lambda: bool(a.notes.frames))
        assert a.notes.frames[0][0].state == "up"


def test_heartbeats_keep_an_idle_link_up() -> None:
    options = {"heartbeat_ms": 50, "link_timeout_ms": 1000}
    with Engine(1, **options) as a, Engine(2, **options) as b:
        assert a.service.dial([b.target], 2) == [OK]
        assert not a.notes.wait_for(lambda: bool(a.notes.downs), 1.5)
        assert link_of(a, 2).state == link_of(b, 1).state == "up"


def test_a_side_that_was_held_up_does_not_judge_the_other() -> None:
    options = {"heartbeat_ms": 50, "link_timeout_ms": 1000}
    with Engine(1, **options) as a, Engine(2, **options) as b:
        assert a.service.dial([b.target], 2) == [OK]
        a.service.call_soon(lambda: time.sleep(1.5))  # what a stop or a long hold of the GIL looks like
        b.service.call_soon(lambda: time.sleep(1.5))
        assert not a.notes.wait_for(lambda: bool(a.notes.downs or b.notes.downs), 2.2)
        assert link_of(a, 2).state == "up"


def test_a_peer_that_does_not_read_is_dropped() -> None:
    with Engine(1) as a, RawPeer(a.address) as peer:
        peer.link(1, 9)
        link, block = link_of(a, 9), bytes(32 << 20)
        for _ in range(9):
            link.send(Unlink(id=1, time_left_ms=0), [block])
        assert a.notes.wait_for(lambda: bool(a.notes.downs))
        with pytest.raises(LinkLost, match="does not read"):
            link.post(Unlink(id=1, time_left_ms=0))


def test_z3_a_broken_protocol_costs_only_that_connection(
    pair: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    caplog.clear()
    with RawPeer(a.address) as before, RawPeer(a.address) as middle, RawPeer(a.address) as up:
        before.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert before.hear() is None
        middle.say(hello(1, identity(8)))
        assert isinstance(middle.hear(), Welcome)
        middle.say(Ping(id=1))
        assert middle.hear() is None
        up.link(1, 9)
        up.say(Confirm(reads_by=("again",)))
        assert a.notes.wait_for(lambda: bool(a.notes.downs))
    assert a.notes.prepared == 2, "nothing is looked at before Confirm"
    assert not a.notes.shown
    broken = [record for record in caplog.records if "broke the protocol" in record.getMessage()]
    assert len(broken) == 3 and not any(record.exc_info for record in caplog.records)
    a.service.ping(link_of(a, 2), time.monotonic() + 2)


def test_stop_says_bye_and_cuts_off_dials(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    with listening_socket() as (_, silent):
        codes: list[LLMStatusCode] = []
        thread = threading.Thread(
            target=lambda: codes.extend(a.service.dial([Target(8, silent), Target(8, silent)], 20))
        )
        thread.start()
        assert wait_until(lambda: bool(a.service._driver.dials._dials))
        watch = Stopwatch()
        a.service.stop("finalize")
        assert watch.within(1.0)
        thread.join()
    assert codes == [LLMStatusCode.LLM_ENGINE_FINALIZED] * 2
    assert [reason for _, reason in a.notes.downs] == ["finalize"]
    assert b.notes.wait_for(lambda: bool(b.notes.downs))
    assert b.notes.downs[0][1] == "the peer dropped the link: finalize"
    a.service.stop("again")
    assert a.service.dial([b.target], 1) == [LLMStatusCode.LLM_ENGINE_FINALIZED]
    assert a.service.links() == []


def test_readers_and_timers_of_other_parts(pair: tuple[Engine, Engine]) -> None:
    a, _ = pair
    left, right = socket.socketpair()
    with left, right:
        got: list[bytes] = []
        seen = threading.Event()

        def read() -> None:
            got.append(left.recv(10))
            seen.set()

        a.service.add_reader(left, read)
        right.send(b"x")
        assert seen.wait(5) and got == [b"x"]
        a.service.remove_reader(left)
        a.service.remove_reader(left)
    order: list[str] = []
    done = threading.Event()

    def set_up() -> None:  # on the thread, so that none runs before the cancel
        now = time.monotonic()
        a.service.call_at(now + 0.06, done.set)
        a.service.call_at(now + 0.05, lambda: order.append("later"))
        a.service.call_at(now + 0.02, lambda: order.append("sooner"))
        a.service.call_at(now + 0.01, lambda: order.append("never")).cancel()

    a.service.call_soon(set_up)
    assert done.wait(5) and order == ["sooner", "later"]


def test_waiting_on_the_control_thread_is_refused(pair: tuple[Engine, Engine]) -> None:
    a, b = pair
    assert a.service.dial([b.target], 2) == [OK]
    texts: list[str] = []
    done = threading.Event()

    def wrong() -> None:
        for call in (
            lambda: a.service.dial([b.target], 1),
            lambda: a.service.ping(link_of(a, 2), time.monotonic() + 1),
        ):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error))
        done.set()

    a.service.call_soon(wrong)
    assert done.wait(5) and len(texts) == 2


def test_nothing_is_lost_per_link(pair: tuple[Engine, Engine]) -> None:
    a, b = pair

    def rounds(count: int) -> None:
        for _ in range(count):
            assert a.service.dial([b.target], 2) == [OK]
            assert a.service.dial([Target(5, b.address)], 2) == [FAILED]
            a.service.drop(link_of(a, 2), "next", tell=True)
            assert b.notes.wait_for(lambda: b.service.links() == [])

    rounds(5)
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    rounds(100)
    assert len(os.listdir("/proc/self/fd")) == fds and threading.active_count() == threads
    for side in pair:
        driver, loop = side.service._driver, side.service._loop
        assert not driver._conns and not driver._handshakes._all and not driver._table._peers
        assert not driver._table._accepted and not driver._table._probes and not driver._table._dials
        assert len(loop._timers) < 400
