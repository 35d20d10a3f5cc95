"""Accepting without descriptors: who waits, who is told, and where the spare one is."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from llm_datadist import _accepting
from llm_datadist._accepting import PATIENCE_S, PAUSE_S, Accepting
from tests.support.shortage import descriptors_left

S = 5.0  # for what comes at once


class Scene:
    """A listener with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.taken: list[socket.socket] = []
        self.reasons: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.accepting = Accepting(
            self.listener, "here", lambda sock, _: self.taken.append(sock), self.refuse, lambda: self.now
        )
        self.clients: list[socket.socket] = []

    def refuse(self, sock: socket.socket, reason: str) -> None:
        self.reasons.append(reason)
        sock.send(b"no")

    def dial(self) -> socket.socket:
        self.clients.append(socket.create_connection(self.listener.getsockname(), S))
        return self.clients[-1]

    def close(self) -> None:
        self.accepting.close()
        for sock in (self.listener, *self.taken, *self.clients):
            sock.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_what_comes_is_taken_and_no_pause_is_asked_for(scene: Scene) -> None:
    scene.dial()
    scene.dial()
    assert scene.accepting.run() == 0.0
    assert len(scene.taken) == 2


def test_g18_of_many_a_few_are_taken_in_one_turn(scene: Scene) -> None:
    for _ in range(20):
        scene.dial()
    for taken in (8, 16, 20):
        assert scene.accepting.run() == 0.0
        assert len(scene.taken) == taken


@pytest.mark.parametrize("spare_lost", [False, True])
def test_g14_a_short_shortage_costs_a_wait(scene: Scene, spare_lost: bool) -> None:
    scene.dial()
    if spare_lost:
        scene.accepting.close()
    with descriptors_left(0):
        for _ in range(3):
            assert scene.accepting.run() == PAUSE_S
            scene.now += PAUSE_S
    assert not scene.taken and not scene.reasons
    assert scene.accepting.run() == 0.0
    assert len(scene.taken) == 1
    assert scene.accepting._spare is not None, "it is taken back"


def test_g14_one_that_goes_on_is_told_to_each_that_waits(scene: Scene) -> None:
    first, second = scene.dial(), scene.dial()
    with descriptors_left(0):
        assert scene.accepting.run() == PAUSE_S
        scene.now += PATIENCE_S
        assert scene.accepting.run() == PAUSE_S
        assert [sock.recv(8) for sock in (first, second)] == [b"no", b"no"]
    assert len(scene.reasons) == 2 and "RLIMIT_NOFILE" in scene.reasons[0]
    third = scene.dial()
    assert scene.accepting.run() == 0.0 and len(scene.taken) == 1
    scene.dial()
    with descriptors_left(0):
        assert scene.accepting.run() == PAUSE_S
        assert len(scene.reasons) == 2, "patience begins anew with each shortage"
    third.close()


def test_g14_a_spare_that_somebody_else_takes_is_taken_back_later(scene: Scene) -> None:
    scene.dial()
    with descriptors_left(0):
        assert scene.accepting.run() == PAUSE_S
        scene.now += PATIENCE_S
        scene.accepting.close()
        thief = os.open(os.devnull, os.O_RDONLY)
        for _ in range(3):
            assert scene.accepting.run() == PAUSE_S, "it does not spin"
        assert not scene.reasons
        os.close(thief)
        assert scene.accepting.run() == PAUSE_S, "there is none for the next one"
        assert len(scene.taken) == 1, "a descriptor is for the one that waits first"
    scene.accepting.run()
    assert scene.accepting._spare is not None


def test_g14_a_refusal_frees_the_spare_for_good_only_if_it_is_stolen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.dial()
    scene.dial()

    def steal(_: str) -> None:
        raise OSError(24, "Too many open files")

    with descriptors_left(0):
        scene.accepting.run()
        scene.now += PATIENCE_S
        monkeypatch.setattr(_accepting, "FileIO", steal)
        assert scene.accepting.run() == PAUSE_S
        assert len(scene.reasons) == 1, "the second one waits for the next look"
        monkeypatch.undo()
    assert scene.accepting.run() == 0.0
    assert len(scene.taken) == 1 and scene.accepting._spare is not None


def test_g14_what_comes_after_a_shortage_is_taken_though_others_are_being_refused(scene: Scene) -> None:
    scene.dial()
    scene.dial()
    with contextlib.ExitStack() as shortage:
        shortage.enter_context(descriptors_left(0))
        scene.accepting.run()
        scene.now += PATIENCE_S
        refuse = scene.accepting._refuse

        def last(sock: socket.socket, reason: str) -> None:
            refuse(sock, reason)
            shortage.close()

        scene.accepting._refuse = last
        assert scene.accepting.run() == 0.0
    assert len(scene.reasons) == 1 and len(scene.taken) == 1


def test_g14_a_shortage_is_over_once_there_is_nobody_to_take(scene: Scene) -> None:
    client = scene.dial()
    with descriptors_left(0):
        scene.accepting.run()
        scene.now += PATIENCE_S
        scene.accepting.run()
        assert client.recv(8) == b"no"
    assert scene.accepting.run() == 0.0
    scene.dial()
    with descriptors_left(0):
        assert scene.accepting.run() == PAUSE_S
        assert len(scene.reasons) == 1, "it waits again"


def test_a_connection_that_cannot_be_used_is_told_why(scene: Scene) -> None:
    def fail(sock: socket.socket, peer: object) -> None:
        raise OSError(28, "No space left on device")

    scene.accepting._take = fail
    client = scene.dial()
    assert scene.accepting.run() == 0.0
    assert client.recv(8) == b"no" and "max_user_watches" in scene.reasons[0]


def test_whoever_takes_it_may_ask_for_a_rest(scene: Scene) -> None:
    def take(sock: socket.socket, peer: object) -> float:
        scene.taken.append(sock)
        return 0.25

    scene.accepting._take = take
    scene.dial()
    scene.dial()
    assert scene.accepting.run() == 0.25
    assert len(scene.taken) == 1, "the other one waits"


def test_it_ends_with_its_listener(scene: Scene) -> None:
    scene.dial()
    scene.listener.close()
    assert scene.accepting.run() == 0.0


def test_the_log_is_not_flooded(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with descriptors_left(1):
        for _ in range(5):
            client = socket.socket()
            client.connect(scene.listener.getsockname())
            assert scene.accepting.run() == PAUSE_S
            client.close()
            scene.accepting.run()
            while scene.taken:
                scene.taken.pop().close()
    assert len(caplog.records) == 1
    assert "cannot accept on here: Too many open files" in caplog.text and "RLIMIT_NOFILE" in caplog.text
