"""Links between real processes: killed, stopped, forked, dialling at the same moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from llm_datadist._link.link import LinkLost
from llm_datadist._wire.messages import Unlink
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.link_peer import LinkPeer
from tests.support.links import Engine
from tests.support.stopping import stop, stopped

OK = LLMStatusCode.LLM_SUCCESS


def descriptors() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_l6_two_processes_dial_at_the_same_moment() -> None:
    with Engine(1) as a, LinkPeer(2) as b:
        for number in range(50):
            b.say(f"dial 1 {a.address.port}")
            assert a.service.dial([b.target], 3) == [OK]
            assert b.hear() == "LLM_SUCCESS"
            link = a.service.get(2)
            assert link is not None and len(a.service.links()) == 1
            a.service.ping(link, time.monotonic() + 2)
            assert b.ask("links") == "1"
            if number % 2:
                a.service.drop(link, "next", tell=True)
            else:
                assert b.ask("drop 1") == "0"
        assert a.notes.wait_for(lambda: len(a.notes.downs) == 50)


def test_a_killed_process_is_noticed_at_once_and_may_come_back() -> None:
    with Engine(1) as a:
        for _ in range(3):
            with LinkPeer(2) as b:
                assert a.service.dial([b.target], 3) == [OK]
                link = a.service.get(2)
                assert link is not None
                a.notes.answers = False
                pending = link.call(Unlink(id=link.next_id(), time_left_ms=1))
                stop(b.process.pid)
                os.kill(b.process.pid, signal.SIGKILL)
                watch = Stopwatch()
                try:
                    pending.wait(watch.began + 5)
                except LinkLost:
                    assert watch.within(0.5)
                assert a.notes.wait_for(lambda: a.service.get(2) is None, 0.5)


def test_t2_a_stopped_process_is_silent_then_down_then_links_again() -> None:
    with Engine(1, heartbeat_ms=50, link_timeout_ms=600) as a, LinkPeer(2, 50, 600) as b:
        assert a.service.dial([b.target], 3) == [OK]
        with stopped(b.process.pid):
            assert a.service.dial([b.target], 0.3) == [LLMStatusCode.LLM_TIMEOUT], (
                "a stopped peer is no dead one"
            )
            link = a.service.get(2)
            assert link is not None and link.state == "silent"
            assert a.notes.wait_for(lambda: bool(a.notes.downs), 2)
        assert a.service.dial([b.target], 3) == [OK]
        assert b.ask("links") == "1"


def test_a_short_stop_of_both_sides_costs_no_link() -> None:
    with LinkPeer(1, 50, 400) as a, LinkPeer(2, 50, 400) as b:
        assert a.ask(f"dial 2 {b.target.address.port}") == "LLM_SUCCESS"
        with stopped(a.process.pid, b.process.pid):
            threading.Event().wait(0.8)
        threading.Event().wait(0.3)
        assert a.ask("links") == b.ask("links") == "1"


@pytest.mark.rule("3.17")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_f1_a_forked_child_closes_its_copies_and_the_parent_does_not_notice() -> None:
    others = set(descriptors())  # of this process, which has nothing to do with the engine
    with Engine(1) as a, LinkPeer(2) as b:
        assert a.service.dial([b.target], 3) == [OK]
        link = a.service.get(2)
        assert link is not None
        before = [name for name in descriptors() if name.startswith(("socket:", "anon_inode:"))]
        assert len(before) >= 4, "listener, link, selector and wake-up"
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                a.service.close_after_fork()
                kinds = ("socket:", "anon_inode:")
                bad = [n for n in descriptors() if n.startswith(kinds) and n not in others]
                os.write(into, repr(bad).encode())
            finally:
                os._exit(0)
        os.close(into)
        with os.fdopen(out) as answer:
            assert answer.read() == "[]"
        os.waitpid(pid, 0)
        a.service.ping(link, time.monotonic() + 2)
        assert a.service.dial([b.target], 3) == [LLMStatusCode.LLM_ALREADY_LINK]
        with LinkPeer(3) as c:
            assert c.ask(f"dial 1 {a.address.port}") == "LLM_SUCCESS", "the parent still accepts"
