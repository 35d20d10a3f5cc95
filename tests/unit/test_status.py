"""Status codes, the exceptions that carry them, and that no exception of ours goes without its code."""

from __future__ import annotations

import ast
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

import llm_datadist
from llm_datadist import LLMException, LLMStatusCode, Status, status

ROOT = Path(__file__).resolve().parents[2]
CODES = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 4294967295,
    "LLM_UNKNOWN_ERROR": -1,
    "LLM_WAIT_PROCESS_TIMEOUT": 0x5010B001,
    "LLM_KV_CACHE_NOT_EXIST": 0x5010B002,
    "LLM_REPEAT_REQUEST": 0x5010B003,
    "LLM_REQUEST_ALREADY_COMPLETED": 0x5010B004,
    "LLM_PARAM_INVALID": 0x5010B005,
    "LLM_ENGINE_FINALIZED": 0x5010B006,
    "LLM_NOT_YET_LINK": 0x5010B007,
    "LLM_ALREADY_LINK": 0x5010B008,
    "LLM_LINK_FAILED": 0x5010B009,
    "LLM_UNLINK_FAILED": 0x5010B00A,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 0x5010B00B,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 0x5010B00C,
    "LLM_PROCESSING_LINK": 0x5010B00D,
    "LLM_DEVICE_OUT_OF_MEMORY": 0x5010B00E,
    "LLM_PREFIX_ALREADY_EXIST": 0x5010B00F,
    "LLM_PREFIX_NOT_EXIST": 0x5010B010,
    "LLM_SEQ_LENOVERLIMIT": 0x5010B011,
    "LLM_NO_FREE_BLOCK": 0x5010B012,
    "LLM_BLOCKS_OUT_OF_MEMORY": 0x5010B013,
    "LLM_EXIST_LINK": 0x5010B018,
    "LLM_FEATURE_NOT_ENABLED": 0x5010B019,
    "LLM_TIMEOUT": 0x5010B01A,
    "LLM_LINK_BUSY": 0x5010B01B,
    "LLM_OUT_OF_MEMORY": 0x5010B01C,
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
}
FAMILIES: dict[str, tuple[type[LLMException], str]] = {
    "ParamInvalidError": (status.ParamInvalidError, "LLM_PARAM_INVALID"),
    "CacheNotExistError": (status.CacheNotExistError, "LLM_KV_CACHE_NOT_EXIST"),
    "NotLinkedError": (status.NotLinkedError, "LLM_NOT_YET_LINK"),
    "LinkFailedError": (status.LinkFailedError, "LLM_LINK_FAILED"),
    "TransferTimeoutError": (status.TransferTimeoutError, "LLM_TIMEOUT"),
    "LinkBusyError": (status.LinkBusyError, "LLM_LINK_BUSY"),
    "OutOfMemoryError": (status.OutOfMemoryError, "LLM_OUT_OF_MEMORY"),
    "FeatureNotEnabledError": (status.FeatureNotEnabledError, "LLM_FEATURE_NOT_ENABLED"),
    "EngineFinalizedError": (status.EngineFinalizedError, "LLM_ENGINE_FINALIZED"),
}


@pytest.mark.rule("1.19")
def test_codes_have_their_numbers() -> None:
    assert {code.name: code.value for code in LLMStatusCode} == CODES
    assert issubclass(LLMStatusCode, IntEnum)


@pytest.mark.rule("1.20")
@pytest.mark.parametrize("name", CODES)
def test_a_code_as_text_is_its_full_name(name: str) -> None:
    code = LLMStatusCode[name]
    assert str(code) == f"{code}" == f"LLMStatusCode.{name}"


@pytest.mark.rule("1.32")
def test_an_exception_carries_its_code() -> None:
    error = LLMException("a", 2, status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert isinstance(error, RuntimeError)
    assert error.args == ("a", 2)
    assert error.status_code is LLMStatusCode.LLM_LINK_BUSY
    with pytest.raises(AttributeError):
        error.status_code = LLMStatusCode.LLM_SUCCESS  # type: ignore[misc]
    with pytest.raises(TypeError):
        LLMException("a", code=LLMStatusCode.LLM_FAILED)  # type: ignore[call-arg]


@pytest.mark.rule("1.33")
def test_the_default_code_of_the_constructor() -> None:
    assert LLMException("a").status_code is LLMStatusCode.LLM_SUCCESS


@pytest.mark.rule("1.40")
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_its_class_and_code(name: str) -> None:
    kind, code = FAMILIES[name]
    assert getattr(llm_datadist, name) is getattr(status, name) is kind
    assert kind.__mro__[1] is LLMException, "families do not catch each other"
    error = kind("why")  # type: ignore[call-arg]
    assert (str(error), error.status_code.name) == ("why", code)
    assert type(status.error_of(LLMStatusCode[code], "why")) is kind


def test_a_pull_that_timed_out_is_of_the_family_of_timeouts() -> None:
    error = status.error_of(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "late")
    assert type(error) is status.TransferTimeoutError
    assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


@pytest.mark.rule("1.41")
@pytest.mark.parametrize("code", LLMStatusCode)
def test_status(code: LLMStatusCode) -> None:
    assert Status(code).status_code is code
    assert Status(code).is_ok() is (code.name == "LLM_SUCCESS")


def _without_code(source: str) -> list[int]:
    """Lines that make a plain LLMException and name no code, or name success."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "LLMException"
        and ({k.arg: ast.unparse(k.value) for k in node.keywords}.get("status_code") or "SUCCESS").endswith("SUCCESS")
    ]  # fmt: skip


@pytest.mark.rule("1.34")
def test_no_exception_of_ours_goes_without_its_code() -> None:
    assert _without_code("raise LLMException('x')\nLLMException('x', status_code=S.LLM_SUCCESS)") == [1, 2]
    assert _without_code("LLMException('x', status_code=S.LLM_FAILED)") == []
    found: dict[str, Any] = {p.name: _without_code(p.read_text()) for p in (ROOT / "src").rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
