"""What stopped a transfer -> class, code, text and cause of what the caller gets (row E1)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist import status
from llm_datadist._engine.executor import MoveError, Stale
from llm_datadist._engine.failures import Context
from llm_datadist._link.link import LinkLost
from llm_datadist._wire.framing import ProtocolError
from llm_datadist.status import LLMStatusCode as Code
from llm_datadist.transports.seam import Fault, FaultKind

CAUSE = OSError(14, "Bad address")


def context(code: Code = Code.LLM_WAIT_PROCESS_TIMEOUT, down: str | None = None) -> Context:
    link: Any = SimpleNamespace(cluster_id=77, address="10.0.0.7:26000", down_reason=down)
    return Context("pull of key K into cache 3", link, time.monotonic() - 1.5, code)


def fault(kind: FaultKind, code: int = 0) -> MoveError:
    return MoveError(Fault(kind, "the reason", code, CAUSE), 10)


CASES: list[tuple[Any, type[status.LLMException], Code]] = [
    (Stale("withdrawn", begun=True), status.CacheNotExistError, Code.LLM_KV_CACHE_NOT_EXIST),
    (LinkLost("reset"), status.LinkFailedError, Code.LLM_LINK_FAILED),
    (ProtocolError("bad"), status.LinkFailedError, Code.LLM_LINK_FAILED),
    (TimeoutError(), status.TransferTimeoutError, Code.LLM_WAIT_PROCESS_TIMEOUT),
    (fault(FaultKind.TIMEOUT), status.TransferTimeoutError, Code.LLM_WAIT_PROCESS_TIMEOUT),
    (fault(FaultKind.CANCELLED), status.LinkFailedError, Code.LLM_LINK_FAILED),
    (fault(FaultKind.PEER_LOST), status.LinkFailedError, Code.LLM_LINK_FAILED),
    (fault(FaultKind.CHANNEL), status.LinkFailedError, Code.LLM_LINK_FAILED),
    (fault(FaultKind.SOURCE), status.LLMException, Code.LLM_FAILED),
    (fault(FaultKind.DESTINATION), status.ParamInvalidError, Code.LLM_PARAM_INVALID),
    (fault(FaultKind.REFUSED, Code.LLM_PARAM_INVALID), status.ParamInvalidError, Code.LLM_PARAM_INVALID),
    (fault(FaultKind.REFUSED, 12345), status.LLMException, Code.LLM_UNKNOWN_ERROR),
    (fault(FaultKind.REFUSED, 0), status.LLMException, Code.LLM_UNKNOWN_ERROR),
    (fault(FaultKind.REFUSED, Code.LLM_ENGINE_FINALIZED), status.LinkFailedError, Code.LLM_LINK_FAILED),
]


@pytest.mark.rule("1.39")
@pytest.mark.parametrize(("stopped_by", "kind", "code"), CASES, ids=lambda v: repr(v)[:40])
def test_class_code_and_text(stopped_by: Any, kind: type[status.LLMException], code: Code) -> None:
    error = context().failure(stopped_by)
    assert type(error) is kind
    assert error.status_code is code
    for words in ("pull of key K into cache 3", "77", "10.0.0.7:26000"):
        assert words in str(error)


@pytest.mark.parametrize(
    "kind",
    [FaultKind.SOURCE, FaultKind.DESTINATION, FaultKind.PEER_LOST, FaultKind.CHANNEL, FaultKind.CANCELLED],
)
def test_the_systems_error_is_the_cause(kind: FaultKind) -> None:
    error = context().failure(fault(kind))
    assert error.__cause__ is CAUSE
    assert "the reason" in str(error)


def test_every_kind_of_fault_has_its_case() -> None:
    assert {e.fault.kind for e, _, _ in CASES if isinstance(e, MoveError)} == set(FaultKind)


@pytest.mark.rule("1.39")
@pytest.mark.parametrize("code", [Code.LLM_WAIT_PROCESS_TIMEOUT, Code.LLM_TIMEOUT])
def test_a_timeout_has_the_code_of_its_call_and_the_elapsed_time(code: Code) -> None:
    for error in (context(code).failure(TimeoutError()), context(code).timed_out()):
        assert error.status_code is code
        elapsed = int(str(error).split(" after ")[1].split(" ms")[0])
        assert 1500 <= elapsed < 60_000
    for theirs in (Code.LLM_WAIT_PROCESS_TIMEOUT, Code.LLM_TIMEOUT):
        assert context(code).refused(theirs, "late").status_code is code


def test_stale_on_a_link_that_went_down_is_the_link() -> None:
    """A peer that goes clears its words first; the reason is the link, not the cache."""
    error = context(down="it said bye").failure(Stale("withdrawn", begun=True))
    assert error.status_code is Code.LLM_LINK_FAILED
    assert "it said bye" in str(error)


def test_a_rule_of_both_sides_keeps_its_text() -> None:
    error = context().invalid(status.ParamInvalidError("64 against 128"))
    assert error.status_code is Code.LLM_PARAM_INVALID
    assert "64 against 128" in str(error)
    assert "cluster 77" in str(error)


@pytest.mark.parametrize("down", [None, "reset"])
def test_g10_a_link_is_said_to_be_down_only_when_it_is(down: str | None) -> None:
    text = str(context(down=down).failure(fault(FaultKind.PEER_LOST)))
    assert ("the link went down" in text) is (down is not None)
    assert "call link_clusters again" in text and "the reason" in text


def test_g10_the_finalize_of_a_peer_is_not_taken_for_ones_own() -> None:
    text = str(context().refused(Code.LLM_ENGINE_FINALIZED, "the engine was finalized; call init again"))
    assert "the peer was finalized" in text and "call init" not in text


def test_g10_a_transport_that_cannot_move_bytes_is_met_anew_only_after_unlinking() -> None:
    assert "unlink_clusters before link_clusters" in str(context().failure(fault(FaultKind.CHANNEL)))
