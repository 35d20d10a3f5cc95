"""Notifications and the calls that go on in the background: bad arguments, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import CacheTask, EngineFinalizedError, ParamInvalidError
from llm_datadist._core.notices import Notice
from tests.api.conftest import Make
from tests.api.test_cache_manager import RIGHT, TABLE

TOO_LONG = "x" * 65537
NOTIFY = [
    ("x", TypeError, "notify must be tuple or list or None, not str"),
    (("x",), TypeError, r"notify must be \(name, message\), not 1 entries"),
    (("x", b"", b""), TypeError, "not 3 entries"),
    ((1, b""), TypeError, r"notify\[0\] must be str, not int"),
    (("x", "y"), TypeError, r"notify\[1\] must be bytes, not str"),
    ((TOO_LONG, b""), ParamInvalidError, r"notify\[0\] has 65537 bytes"),
    (("x", TOO_LONG.encode()), ParamInvalidError, r"notify\[1\] has 65537 bytes"),
    (("\ud800", b""), ParamInvalidError, r"notify\[0\]"),
]
CALLS = ["pull_cache", "pull_blocks", "push_cache", "push_blocks"]
METHODS = [*CALLS, *(f"{name}_async" for name in CALLS)]
ROWS = [
    *((method, "notify", *row) for method in METHODS for row in NOTIFY),
    *(
        (f"{method}_async", name, *row)
        for method in CALLS
        for name, rows in TABLE[method].items()
        for row in rows
    ),
]


@pytest.mark.parametrize(("method", "name", "value", "error", "text"), ROWS)
@pytest.mark.rule("5.138")
def test_bad_argument_is_named_and_reaches_no_engine(
    method: str, name: str, value: Any, error: type[Exception], text: str, make: Make
) -> None:
    accessible, right = RIGHT[method.removesuffix("_async")]
    dist, engine = make(EnableRemoteCacheAccessible=accessible)
    with pytest.raises(error, match=text) as caught:
        getattr(dist.cache_manager, method)(**{**right, name: value})
    assert type(caught.value) is error
    assert name in str(caught.value)
    assert engine.calls == [("start",)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("notify", [None, ("n", b"m"), ["n", b"m"]])
@pytest.mark.rule("5.139")
def test_the_engine_gets_the_notice(method: str, notify: Any, make: Make) -> None:
    accessible, right = RIGHT[method.removesuffix("_async")]
    dist, engine = make(EnableRemoteCacheAccessible=accessible)
    result = getattr(dist.cache_manager, method)(**right, notify=notify)
    (called, request) = engine.calls[-1]
    assert called == method.split("_")[0] + ("_async" if method.endswith("_async") else "")
    assert request.notice == (None if notify is None else Notice("n", b"m"))
    assert isinstance(result, CacheTask) is method.endswith("_async")


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.rule("5.138")
def test_the_background_call_asks_for_the_same(method: str, make: Make) -> None:
    accessible, right = RIGHT[method]
    dist, engine = make(EnableRemoteCacheAccessible=accessible)
    getattr(dist.cache_manager, method)(**right)
    getattr(dist.cache_manager, f"{method}_async")(**right)
    plain, background = (call[1] for call in engine.calls[-2:])
    assert str(plain) == str(background)


@pytest.mark.rule("1.22")
@pytest.mark.parametrize("method", [name for name in METHODS if name.endswith("_async")])
def test_e1_state_comes_before_arguments(method: str, make: Make) -> None:
    dist, _ = make()
    manager = dist.cache_manager
    dist.finalize()
    with pytest.raises(EngineFinalizedError):
        getattr(manager, method)(None, None)


SEND = {"remote_cluster_id": 2, "name": "n", "message": b"m"}


@pytest.mark.rule("4.99")
@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("remote_cluster_id", "2", TypeError, "must be an int, not str"),
        ("remote_cluster_id", True, TypeError, "not bool"),
        ("remote_cluster_id", -1, ValueError, "is -1"),
        ("remote_cluster_id", 2**64, ValueError, "is 18446744073709551616"),
        ("name", b"n", TypeError, "must be str, not bytes"),
        ("name", TOO_LONG, ParamInvalidError, "has 65537 bytes; at most 65536"),
        ("message", "m", TypeError, "must be bytes, not str"),
        ("message", TOO_LONG.encode(), ParamInvalidError, "has 65537 bytes; at most 65536"),
    ],
)
def test_send_notify_refuses(name: str, value: Any, error: type[Exception], text: str, make: Make) -> None:
    dist, engine = make()
    with pytest.raises(error, match=text) as caught:
        dist.send_notify(**{**SEND, name: value})
    assert type(caught.value) is error
    assert name in str(caught.value)
    assert engine.calls == [("start",)]


def test_notifications_reach_the_engine(make: Make) -> None:
    dist, engine = make()
    dist.send_notify(2**64 - 1, "n", b"m")
    assert dist.get_notifies() == []
    assert engine.calls[1:] == [("send_notify", 2**64 - 1, Notice("n", b"m")), ("notifies",)]
    dist.finalize()
    for use in (lambda: dist.send_notify("wrong", "too", 3), dist.get_notifies):  # type: ignore[arg-type]
        with pytest.raises(EngineFinalizedError):
            use()
