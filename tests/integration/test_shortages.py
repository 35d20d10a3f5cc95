"""Rows G3, G8 and G14: the system refuses something for a moment, at each place of each operation.

Nothing is left behind, nothing says that it is there while it is not, and the same works as soon as there is
something again. The process is the test's own: what it asks for is counted, and the k-th thing is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from tests.support import actors, leaks
from tests.support.short_pair import (
    BACKENDS,
    FAILED,
    LATE,
    LINK_FAILED,
    OUT,
    SUCCESS,
    ShortPair,
    attempt,
    judge,
    little_time,
    memfds,
    once_and_lasting,
)
from tests.support.shortage import LIMITS, Shortage, shortages
from tests.support.world import wait_until

# ---- init and finalize ------------------------------------------------------------------------------------------


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g3_g14_init_without_threads_or_descriptors_leaves_nothing(
    hurried: None, backend: str, lasting: bool
) -> None:
    values = actors.options("B", backend, "127.0.0.1:0", AllowMultipleInstances="1")
    engine = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    engine.init(values)
    transports = set(engine._engine._transports.opened)  # type: ignore[union-attr]
    engine.finalize()
    kinds = set()
    for shortage in shortages(lasting=lasting):
        before, mapped = leaks.take(), memfds()
        with shortage:
            error = attempt(engine.init, values)
        judge(error, shortage, OUT, FAILED)
        kinds |= set(shortage.refused)
        if error is not None:
            assert memfds(mapped) <= mapped
            assert not leaks.differences(before), shortage.refused
            with pytest.raises(RuntimeError, match=r"not initialised|is finalized"):
                _ = engine.cache_manager
            engine.init(values)
        assert set(engine._engine._transports.opened) == transports  # type: ignore[union-attr]
        with Shortage(1, lasting=True):
            engine.finalize()
        assert not leaks.differences(before), shortage.refused
    assert {"thread", "socket", "epoll", "eventfd", "watch", "FileIO"} <= kinds


# ---- links and transfers -----------------------------------------------------------------------------------------


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g8_g14_a_link_with_either_side_short(
    short_pairs: Callable[..., ShortPair], backend: str, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = short_pairs("B", backend)
    assert pair.up() == SUCCESS
    ways = [link.transport for link in pair.a.links()]
    pair.down()
    kinds = set()
    for shortage in shortages(lasting=lasting):
        before, mapped = leaks.take(), memfds()
        with shortage:
            code = pair.up()
        kinds |= set(shortage.refused)
        assert code in (SUCCESS, LINK_FAILED), (code, shortage.refused)
        if code == SUCCESS:
            for link in pair.a.links():
                assert link.transport in ways or re.search(LIMITS, "; ".join(link.reasons)), link
            error = attempt(pair.pull, pair.a, pair.b)
            assert pair.arrived(pair.a) if error is None else backend == "shm"
            if "not the proof of a handshake that is under way" in str(
                error
            ):  # by then it was over; the log says why
                assert re.search(LIMITS, caplog.text), shortage.refused
            else:
                judge(error, shortage, LINK_FAILED)
            error = None
            pair.down()
        else:
            # One that is refused before it has said what it wants is closed: the log of its owner tells why.
            assert re.search(LIMITS, str(pair.a.link_error(2)) + caplog.text), (
                shortage.refused,
                pair.a.link_error(2),
            )
        caplog.clear()
        assert not leaks.differences(before), shortage.refused
        assert memfds(mapped) <= mapped, shortage.refused
        assert pair.up() == SUCCESS
        assert [link.transport for link in pair.a.links()] == ways
        pair.pull(pair.a, pair.b)
        assert pair.arrived(pair.a)
        pair.down()
    assert "socket" in kinds and kinds & {"accept", "watch"}


@once_and_lasting
@pytest.mark.parametrize("dialled", [True, False], ids=["by the reader", "by the owner"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["A", "B"])
def test_g3_g14_the_first_pull_with_either_side_short(
    short_pairs: Callable[..., ShortPair],
    mode: str,
    backend: str,
    dialled: bool,
    lasting: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The owner's serving thread is started with the first pull over tcp: so each attempt has new engines."""
    for shortage in shortages(lasting=lasting):
        pair = short_pairs(mode, backend, serving=False)
        assert pair.up() == SUCCESS
        reader, owner = (pair.a, pair.b) if dialled else (pair.b, pair.a)
        with shortage, little_time(reader) if lasting and not dialled else contextlib.nullcontext():
            error = attempt(pair.pull, reader, owner)
        if error is None:
            assert pair.arrived(reader)
        elif backend == "tcp" and getattr(error, "status_code", None) in (LATE, LINK_FAILED):
            # A connection that is closed before its reader has asked, or not dialled: the log says why.
            text = str(error)
            assert wait_until(lambda: re.search(LIMITS, caplog.text + text) is not None), shortage.refused  # noqa: B023
        else:
            judge(error, shortage, OUT, LINK_FAILED)
        caplog.clear()
        if "meets that peer anew" in str(
            error
        ):  # the peer's memory was refused, and is given once for each link
            pair.down()
            assert pair.up() == SUCCESS
        for _ in range(2):
            pair.pull(reader, owner)
            assert pair.arrived(reader)


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g14_a_push_with_either_side_short(
    short_pairs: Callable[..., ShortPair], backend: str, lasting: bool
) -> None:
    for shortage in shortages(lasting=lasting):
        pair = short_pairs("B", backend)
        assert pair.up() == SUCCESS
        with shortage, little_time(pair.a) if lasting else contextlib.nullcontext():
            error = attempt(pair.push, pair.a, pair.b)
        if not isinstance(error, LLMException) or error.status_code != LLMStatusCode.LLM_TIMEOUT:
            judge(error, shortage, OUT, LINK_FAILED)
        if "meets that peer anew" in str(error):
            pair.down()
            assert pair.up() == SUCCESS
        for _ in range(2):
            pair.push(pair.a, pair.b)
            assert pair.arrived(pair.b)
