"""How messages leave: in calls that keep the GIL where they are short, whole whatever the socket takes."""

from __future__ import annotations

import threading

from llm_datadist._engine.control_calls import ControlCalls
from llm_datadist._link.link import Link
from llm_datadist._link.outbox import Outbox
from llm_datadist._wire.messages import Unlink
from llm_datadist.status import LLMStatusCode
from tests.support.links import Engine

OK = LLMStatusCode.LLM_SUCCESS


def link_of(engine: Engine, cluster_id: int) -> Link:
    link = engine.service.get(cluster_id)
    assert link is not None
    return link


class Noting(ControlCalls):
    """Notes what is sent; the socket takes ``most`` bytes at once."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__()
        self.most = most
        self.sent: list[int] = []

    def send(self, fd: int, outbox: Outbox) -> None:
        part = Outbox()
        part.put([outbox.joined()[: self.most]])
        super().send(fd, part)
        self.sent.append(part.forget_sent())
        outbox.send(int, self.sent[-1])


def test_frames_arrive_whole_however_little_the_socket_takes() -> None:
    with Engine(1, calls=Noting(most=7)) as a, Engine(2) as b:
        assert a.service.dial([b.target], 5) == [OK]
        link = link_of(a, 2)
        sent = [[bytes([number]) * 50, bytes([number]) * number] for number in range(20)]
        for number, attachments in enumerate(sent):
            link.post(Unlink(id=number, time_left_ms=0), attachments)
        link.flush()
        assert b.notes.wait_for(lambda: len(b.notes.frames) == 20)
        assert [[bytes(part) for part in frame.attachments] for _, frame in b.notes.frames] == sent


def test_nobody_waits_for_a_socket_that_takes_nothing() -> None:
    calls = Noting()
    with Engine(1, calls=calls) as a, Engine(2) as b:
        assert a.service.dial([b.target], 5) == [OK]
        calls.most = 0
        sender = threading.Thread(
            target=link_of(a, 2).send, args=(Unlink(id=1, time_left_ms=0),), daemon=True
        )
        sender.start()
        sender.join(5)
        assert not sender.is_alive() and not b.notes.frames
        calls.most = 1 << 30
        assert b.notes.wait_for(lambda: len(b.notes.frames) == 1)


def test_short_messages_leave_in_one_call_that_keeps_the_gil() -> None:
    """Those that were posted together, and no more than such a call may send."""
    calls = Noting()
    with Engine(1, heartbeat_ms=60000, calls=calls) as a, Engine(2, heartbeat_ms=60000) as b:
        b.notes.answers = False
        assert a.service.dial([b.target], 5) == [OK]
        assert a.notes.wait_for(lambda: bool(a.notes.ups))
        link = link_of(a, 2)
        a.service.call_soon(lambda: calls.sent.clear())
        done = threading.Event()

        def send() -> None:
            link.post(Unlink(id=1, time_left_ms=0), [bytes(1000)])
            link.send(Unlink(id=2, time_left_ms=0), [bytes(1000)])
            link.send(Unlink(id=3, time_left_ms=0), [bytes(calls.nbytes)])
            done.set()

        a.service.call_soon(send)
        assert done.wait(5)
        assert b.notes.wait_for(lambda: len(b.notes.frames) == 3)
        assert len(calls.sent) == 1 and 2000 < calls.sent[0] < 3000
