"""What a call owes its peer is settled where an interrupt or a late word strikes (G4, G7, G9)."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode, Memtype
from llm_datadist import MemInfo as Range
from llm_datadist._engine import executor, receiver
from llm_datadist._engine.background import _Job
from llm_datadist._engine.executor import MoveError, Stale
from llm_datadist._engine.failures import Refusal
from llm_datadist.transports import shm_memory
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support import actors
from tests.support.engines import Engines
from tests.support.steps import Steps
from tests.support.world import wait_until

SLOT = CacheDesc(2, [1, 64], DataType.DT_UINT8)
GONE, LATE, WAIT_LATE, INVALID = (
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_PARAM_INVALID,
)
STRIDE = [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


class Two(Engines):
    """An owner (1) and a reader (2), linked."""

    def __init__(self, mode: str, backend: str = "local", timeout_ms: int = 2000) -> None:
        super().__init__(mode, backend, timeout_ms)
        self.owner, self.reader = self.make(1), self.make(2)
        assert self.link(self.reader, 1, self.owner) == LLMStatusCode.LLM_SUCCESS
        self.mine = self.reader.cache_manager

    def slot(self, engine: Any, *keys: CacheKey) -> Any:
        memory = self.space(engine, (2, 1, 64), 7)
        self._held.append(memory)
        return engine.cache_manager.register_cache(SLOT, [t.ctypes.data for t in memory], keys)

    def state(self, engine: Any) -> Any:
        return engine._engine._state

    def refused(self, call: Callable[[], object]) -> LLMException:
        with pytest.raises(LLMException) as caught:
            call()
        return caught.value


@pytest.fixture
def managed() -> Iterator[Two]:
    with Two("A") as two:
        yield two


@pytest.fixture
def accessible() -> Iterator[Two]:
    with Two("B") as two:
        yield two


# ---- G7 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", STRIDE)
@pytest.mark.parametrize("notify", [None, ("n", b"")], ids=["", "notify"])
def test_g7_an_interrupted_pull_holds_nothing(managed: Two, notify: Any, stride: int) -> None:
    two = managed
    here = two.slot(two.reader)
    two.slot(two.owner, CacheKey(0, 5))
    leases = two.state(two.owner).leases
    two.mine.pull_cache(CacheKey(1, 5), here, notify=notify)
    two.owner.get_notifies()
    for number in itertools.count(1, stride):
        steps = Steps(number)
        interrupted = steps.run(lambda: two.mine.pull_cache(CacheKey(1, 5), here, notify=notify))
        assert wait_until(lambda: not leases.all(), 0.5), steps.where
        assert wait_until(lambda: not two.owner._engine._endings.pending, 0.5), steps.where  # type: ignore[union-attr]
        if not interrupted:
            break
    assert number > 100
    assert two.reader.unlink_clusters([actors.cluster(1)], 500)[0] == LLMStatusCode.LLM_SUCCESS


# ---- G2 ------------------------------------------------------------------------------------------------


def test_g2_a_cancel_that_comes_too_late_finds_the_success(
    managed: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = managed
    here = two.slot(two.reader)
    two.slot(two.owner, CacheKey(0, 5))
    answer, reached, go_on = _Job._answer, threading.Event(), threading.Event()

    def held(job: _Job, *arguments: Any) -> None:
        if threading.current_thread().name == "llm-datadist-worker":
            reached.set()
            go_on.wait(20)
        answer(job, *arguments)

    monkeypatch.setattr(_Job, "_answer", held)
    task = two.mine.pull_cache_async(CacheKey(1, 5), here, notify=("n", b""))
    assert reached.wait(10)
    assert task.cancel() is False
    assert task.synchronize(0) == LLMStatusCode.LLM_SUCCESS
    go_on.set()
    assert [n.name for n in two.owner.get_notifies()] == ["n"]


# ---- G4 ------------------------------------------------------------------------------------------------


def test_g4_a_push_that_its_own_time_cuts_off_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destination finds the lease cleared, by a clock of its own by which there is time left."""
    with Two("B", timeout_ms=300) as two:
        source, _ = two.blocks(two.reader)
        two.blocks(two.owner, model_id=0)
        leases = two.state(two.reader).leases

        def cut_off(*arguments: Any) -> None:
            assert wait_until(lambda: not leases.all(), 5)
            raise Stale("its owner withdrew it while it was being read", begun=True)

        monkeypatch.setattr(receiver, "move", cut_off)
        error = two.refused(lambda: two.mine.push_blocks(BlocksCacheKey(1, 0), source, [1], [1]))
        assert error.status_code is LATE


@pytest.mark.parametrize("begun", [False, True])
def test_g4_a_push_whose_source_is_withdrawn_says_so(
    accessible: Two, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """The destination only sees that the lease has ended; its initiator knows that it was not for want of time."""
    two = accessible
    source, memory = two.blocks(two.reader)
    two.blocks(two.owner, model_id=0)
    whole = Range(Memtype.MEM_TYPE_DEVICE, memory.ctypes.data, memory.nbytes)

    def withdrawn(*arguments: Any) -> None:
        two.mine.remap_registered_memory(whole)
        raise Stale("its owner withdrew it", begun=begun)

    monkeypatch.setattr(receiver, "move", withdrawn)
    error = two.refused(lambda: two.mine.push_blocks(BlocksCacheKey(1, 0), source, [1], [1]))
    assert (error.status_code, "mapped anew" in str(error)) == (GONE, True)
    assert isinstance(error.__cause__, Refusal)


def test_g4_a_word_that_is_found_changed_too_late_is_a_time_out(
    managed: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = managed
    here = two.slot(two.reader)
    two.slot(two.owner, CacheKey(0, 5))
    leases = two.state(two.owner).leases
    check = executor._check_word

    def late(peer: Any, channel: Any, wanted: Any, deadline: float, *, begun: bool) -> None:
        assert wait_until(lambda: executor.time.monotonic() > deadline, 5)
        leases.expire(executor.time.monotonic() + 1)
        check(peer, channel, wanted, deadline + 5, begun=begun)

    monkeypatch.setattr(executor, "_check_word", late)
    error = two.refused(lambda: two.mine.pull_cache(CacheKey(1, 5), here))
    assert error.status_code is WAIT_LATE


# ---- G9 ------------------------------------------------------------------------------------------------


def causes(error: BaseException) -> list[BaseException]:
    found = []
    cause = error.__cause__
    while cause is not None:
        found.append(cause)
        cause = cause.__cause__
    return found


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", list(FaultKind))
def test_g9_a_failed_pull_leads_to_its_fault(
    accessible: Two, monkeypatch: pytest.MonkeyPatch, kind: FaultKind, in_background: bool
) -> None:
    two, reason = accessible, OSError(5, "Input/output error")
    here, _ = two.blocks(two.reader)
    two.blocks(two.owner, model_id=0)

    def fail(*arguments: Any) -> None:
        raise MoveError(Fault(kind, "said so", LLMStatusCode.LLM_FAILED, reason), 0)

    monkeypatch.setattr(executor, "_move", fail)
    how = (BlocksCacheKey(1, 0), here, [1, 3], [1, 3])
    if in_background:
        error = two.mine.pull_blocks_async(*how).exception(5000)
        assert error is not None
    else:
        error = two.refused(lambda: two.mine.pull_blocks(*how))
    found = causes(error)
    said = [c for c in found if isinstance(c, Refusal)]
    assert reason in found or (kind is FaultKind.REFUSED and said and said[0].text == "said so")


def test_g9_a_refusal_of_the_peer_is_the_cause(accessible: Two) -> None:
    two = accessible
    here, _ = two.blocks(two.reader)
    calls: list[Callable[[], object]] = [
        lambda: two.mine.pull_blocks(BlocksCacheKey(1, 3), here, [1], [1]),
        lambda: two.mine.push_blocks(BlocksCacheKey(1, 3), here, [1], [1]),
    ]
    for call in calls:
        error = two.refused(call)
        cause = error.__cause__
        assert isinstance(cause, Refusal) and (cause.code, cause.text[:9]) == (GONE, "no cache "), call


def test_g9_a_link_that_the_system_ended_leads_to_what_it_said(
    accessible: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, reason = accessible, ConnectionResetError(104, "Connection reset by peer")
    here, _ = two.blocks(two.reader)
    two.blocks(two.owner, model_id=0)
    link = two.state(two.reader).links.get(1)

    def reset(*arguments: Any) -> None:
        conn = link._carrier
        two.state(two.reader).links.run(lambda: conn.close("the connection failed: reset", cause=reason))
        raise Stale("gone", begun=False)

    monkeypatch.setattr(executor, "_move", reset)
    for call in (
        lambda: two.mine.pull_blocks(BlocksCacheKey(1, 0), here, [1], [1]),
        lambda: two.reader.send_notify(1, "n", b""),
    ):
        error = two.refused(call)
        if error.status_code is LLMStatusCode.LLM_LINK_FAILED:
            assert reason in causes(error)


def test_g9_a_cancelled_task_leads_to_what_became_of_it(
    managed: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = managed
    here = two.slot(two.reader)
    two.slot(two.owner, CacheKey(0, 5))

    def until_cut(peer: Any, wanted: Any, destination: Any, deadline: float, flight: Any) -> None:
        assert wait_until(lambda: flight.error is not None, 5)
        flight.check()

    monkeypatch.setattr(executor, "_move", until_cut)
    task = two.mine.pull_cache_async(CacheKey(1, 5), here)
    task.cancel()
    error = task.exception(5000)
    assert error is not None and isinstance(error.__cause__, LLMException)


def test_g9_a_data_connection_that_breaks_leads_to_what_the_system_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = OSError(5, "Input/output error")

    def broken(*arguments: Any) -> None:
        raise reason

    with Two("B", "tcp") as two:
        here, _ = two.blocks(two.reader)
        two.blocks(two.owner, model_id=0)
        monkeypatch.setattr(ReadingConnection, "_request", broken)
        error = two.refused(lambda: two.mine.pull_blocks(BlocksCacheKey(1, 0), here, [1, 3], [1, 3]))
        assert (error.status_code, error.__cause__) == (LLMStatusCode.LLM_LINK_FAILED, reason)


def test_g9_memory_that_cannot_be_mapped_leads_to_what_the_system_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shm_memory, "map_memory", refused)
    with Two("B", "shm") as two:
        here, _ = two.blocks(two.reader)
        two.blocks(two.owner, model_id=0)
        error = two.refused(lambda: two.mine.pull_blocks(BlocksCacheKey(1, 0), here, [1, 3], [1, 3]))
        assert isinstance(error.__cause__, OSError) and error.__cause__.errno == 12


def test_g9_errors_with_their_causes_can_be_pickled() -> None:
    fault = Fault(FaultKind.CHANNEL, "why", 3)
    for error in (Refusal(5, "no"), MoveError(fault, 7), Stale("gone", begun=True)):
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
