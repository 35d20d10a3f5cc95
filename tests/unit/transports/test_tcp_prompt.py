"""Units over TCP: the answer of an owner who was prompt the last time is looked for without going to sleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm_datadist.transports import tcp_reading
from llm_datadist.transports.tcp_frames import HEADER_NBYTES
from llm_datadist.transports.tcp_pool import Taker
from tests.support.tcp_rig import CALL_S
from tests.support.unit_rig import UnitRig


@pytest.fixture
def rig() -> Iterator[UnitRig]:
    rig = UnitRig()
    yield rig
    rig.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each look for an answer found, for owners of whom every answer counts as prompt."""
    found: list[int] = []
    real = tcp_reading.receive_if_there

    def look(fd: int, address: int, nbytes: int) -> int:
        found.append(real(fd, address, nbytes))
        return found[-1]

    monkeypatch.setattr(tcp_reading, "receive_if_there", look)
    monkeypatch.setattr(tcp_reading, "_PROMPT_S", CALL_S)
    return found


def test_the_answer_of_a_prompt_owner_is_looked_for(rig: UnitRig, looks: list[int]) -> None:
    assert rig.pull(1, 1) and not looks, "it has not been prompt yet"
    for unit in range(3):
        looks.clear()
        assert rig.pull(unit, 1)
        assert 0 < len(looks) <= tcp_reading._LOOKS


def test_that_of_another_owner_is_waited_for(
    rig: UnitRig, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_reading, "_PROMPT_S", 0.0)
    assert rig.pull(1, 1) and rig.pull(2, 1)
    assert not looks


def test_nobody_looks_while_others_wait_too(rig: UnitRig, looks: list[int]) -> None:
    """Looking takes the processor that the owner, or they, may need."""
    assert rig.pull(1, 1)
    other = Taker()
    rig.channel.pool._busy.add(other)
    assert rig.pull(2, 1) and not looks
    rig.channel.pool._busy.remove(other)
    assert rig.pull(2, 1) and looks


def test_the_time_to_look_is_short(rig: UnitRig, monkeypatch: pytest.MonkeyPatch, looks: list[int]) -> None:
    """Then the thread goes to sleep, as ever."""
    assert rig.pull(1, 1)
    calls: list[int] = []
    monkeypatch.setattr(tcp_reading, "receive_if_there", lambda *_: calls.append(1) or -1)
    assert rig.pull(2, 1)
    assert len(calls) == tcp_reading._LOOKS


@pytest.mark.parametrize("pieces", [[1] * HEADER_NBYTES, [5, 11], [15, 1]], ids=str)
def test_a_header_in_pieces_is_looked_for_in_pieces(
    rig: UnitRig, monkeypatch: pytest.MonkeyPatch, looks: list[int], pieces: list[int]
) -> None:
    assert rig.pull(1, 1)
    real, left = tcp_reading.receive_into, list(pieces)

    def piece(fd: int, address: int, nbytes: int) -> int:
        assert nbytes == sum(left)
        return real(fd, address, left.pop(0))

    monkeypatch.setattr(tcp_reading, "receive_if_there", piece)
    assert rig.pull(2, 1)
    assert not left


def test_an_owner_that_hangs_up_is_noticed_by_a_look(
    rig: UnitRig, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.pull(1, 1)
    monkeypatch.setattr(tcp_reading, "receive_if_there", lambda *_: 0)
    assert not rig.pull(2, 1)
    assert not rig.sockets
