"""Notifications: limits of their size, and the queue."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist._core.limits import NOTIFICATIONS, NOTIFY_NBYTES
from llm_datadist._core.notices import Notice, NoticeQueue, checked_notice
from llm_datadist.clusters import Notify
from llm_datadist.status import OutOfMemoryError, ParamInvalidError


def notify(number: int) -> Notify:
    return Notify(1, f"n{number}", b"")


@pytest.mark.rule("4.101")
def test_the_contracts_limits() -> None:
    assert (NOTIFY_NBYTES, NOTIFICATIONS) == (65536, 4096)


@pytest.mark.parametrize(("name", "message"), [("", b""), ("x" * 65536, b"y" * 65536), ("ü" * 32768, b"\0")])
def test_what_fits(name: str, message: bytes) -> None:
    assert checked_notice("name", name, "message", message) == Notice(name, message)


@pytest.mark.rule("4.99")
@pytest.mark.parametrize(
    ("name", "message", "error", "text"),
    [
        ("x" * 65537, b"", ParamInvalidError, "name has 65537 bytes; at most 65536"),
        ("ü" * 32769, b"", ParamInvalidError, "name has 65538 bytes"),
        ("", b"y" * 65537, ParamInvalidError, "message has 65537 bytes"),
        ("\ud800", b"", ParamInvalidError, "UTF-8"),
        (b"x", b"", TypeError, "name must be str, not bytes"),
        (None, b"", TypeError, "name must be str"),
        ("x", "y", TypeError, "message must be bytes, not str"),
        ("x", bytearray(b"y"), TypeError, "message must be bytes, not bytearray"),
    ],
)
def test_what_does_not(name: Any, message: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        checked_notice("name", name, "message", message)
    assert type(caught.value) is error


def test_queue_keeps_the_order_of_admission() -> None:
    queue = NoticeQueue()
    queue.park("a", notify(1))
    queue.park("b", notify(3))
    assert queue.take() == []
    assert queue.admit("b") and queue.admit("a")
    assert not queue.admit("a")
    assert queue.take() == [notify(3), notify(1)]
    assert queue.take() == []


def test_a_withdrawn_one_is_never_admitted() -> None:
    queue = NoticeQueue()
    queue.park("a", notify(1))
    assert queue.withdraw("a")
    assert not queue.withdraw("a")
    assert not queue.admit("a")
    assert queue.take() == []


def test_parked_ones_count_and_free_their_place() -> None:
    queue = NoticeQueue(capacity=2)
    queue.park("a", notify(1))
    queue.park("b", notify(2))
    queue.admit("b")
    with pytest.raises(OutOfMemoryError, match="holds 2"):
        queue.park("c", notify(3))
    with pytest.raises(OutOfMemoryError, match="get_notifies"):
        queue.park("c", notify(3))
    queue.withdraw("a")
    queue.park("c", notify(3))
    queue.admit("c")
    assert queue.take() == [notify(2), notify(3)]
    queue.park("d", notify(4))
