"""The two-sided link, switch_role and drain: arguments, before any engine is asked (contract section 4)."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    EngineFinalizedError,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    ParamInvalidError,
    RegisterMemStatus,
)
from tests.api.conftest import Make

RANKS = {1: 0, 2: 1}
BIG = 2**64

USES: list[Any] = [
    lambda d: d.link(1, 2, 3),
    lambda d: d.unlink("x"),
    lambda d: d.query_register_mem_status("x"),
    lambda d: d.switch_role("x", 1),
    lambda d: d.drain("x"),
]


@pytest.mark.rule("1.22")
@pytest.mark.parametrize("use", USES)
def test_e1_state_is_checked_before_arguments(use: Any, make: Make) -> None:
    with pytest.raises(RuntimeError, match="LLMDataDist 7 is not initialised") as caught:
        use(LLMDataDist(LLMRole.MIX, 7))
    assert not isinstance(caught.value, LLMException)
    dist, _ = make()
    dist.finalize()
    with pytest.raises(EngineFinalizedError):
        use(dist)


BAD: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("link", (1, RANKS, "{}"), TypeError, "comm_name must be str, not int"),
    ("link", (b"c", RANKS, "{}"), TypeError, "comm_name must be str, not bytes"),
    ("link", ("c", [(1, 0)], "{}"), TypeError, "cluster_rank_info must be dict, not list"),
    ("link", ("c", {"1": 0, 2: 1}, "{}"), TypeError, "cluster id of cluster_rank_info must be an int, not str"),
    ("link", ("c", {True: 0, 2: 1}, "{}"), TypeError, "cluster_rank_info must be an int, not bool"),
    ("link", ("c", {1: "0", 2: 1}, "{}"), TypeError, r"cluster_rank_info\[1\] must be an int, not str"),
    ("link", ("c", {1: 0.0, 2: 1}, "{}"), TypeError, r"cluster_rank_info\[1\] must be an int, not float"),
    ("link", ("c", {-1: 0, 2: 1}, "{}"), ValueError, "cluster id of cluster_rank_info is -1"),
    ("link", ("c", {BIG: 0, 2: 1}, "{}"), ValueError, "cluster_rank_info is 18446744073709551616"),
    ("link", ("c", {1: -1, 2: 1}, "{}"), ValueError, r"cluster_rank_info\[1\] is -1"),
    ("link", ("c", {1: 2**32, 2: 1}, "{}"), ValueError, r"cluster_rank_info\[1\] is 4294967296"),
    ("link", ("c", RANKS, {"server_list": []}), TypeError, "rank_table must be str, not dict"),
    ("link", ("c", RANKS, None), TypeError, "rank_table must be str, not NoneType"),
    ("unlink", ("1",), TypeError, "comm_id must be an int, not str"),
    ("unlink", (True,), TypeError, "comm_id must be an int, not bool"),
    ("unlink", (-1,), ValueError, "comm_id is -1"),
    ("unlink", (BIG,), ValueError, "comm_id is 18446744073709551616"),
    ("query_register_mem_status", (1.0,), TypeError, "comm_id must be an int, not float"),
    ("query_register_mem_status", (-1,), ValueError, "comm_id is -1"),
    ("switch_role", (1,), TypeError, "role must be LLMRole, not int"),
    ("switch_role", ("PROMPT",), TypeError, "role must be LLMRole, not str"),
    ("switch_role", (LLMRole.MIX, "x"), TypeError, "switch_options must be dict.*, not str"),
    ("switch_role", (LLMRole.MIX, {1: "x"}), TypeError, "a key of switch_options must be str, not int"),
    ("switch_role", (LLMRole.MIX, {"llm.listenIpInfo": 5}), TypeError, r"\['llm.listenIpInfo'\] must be str"),
    ("switch_role", (LLMRole.MIX, {"llm.listenIpInfo": ""}), ParamInvalidError, "llm.listenIpInfo .* is ''"),
    ("switch_role", (LLMRole.MIX, {"llm.listenIpInfo": "h:-1"}), ParamInvalidError, "'h:-1'"),
    ("switch_role", (LLMRole.MIX, {"llm.listenIpInfo": "h:65536"}), ParamInvalidError, "'h:65536'"),
    ("drain", ("1",), TypeError, "timeout_ms must be an int, not str"),
    ("drain", (1.5,), TypeError, "timeout_ms must be an int, not float"),
    ("drain", (0,), ParamInvalidError, "timeout_ms is 0 ms; it must be greater than 0"),
    ("drain", (-5,), ParamInvalidError, "timeout_ms is -5 ms"),
    ("drain", (2**31,), ValueError, "timeout_ms is 2147483648"),
]  # fmt: skip


@pytest.mark.rule("1.23", "4.58")
@pytest.mark.parametrize(("method", "arguments", "error", "text"), BAD)
def test_bad_arguments_raise_and_reach_no_engine(
    method: str, arguments: tuple[Any, ...], error: type[Exception], text: str, make: Make
) -> None:
    dist, engine = make()
    with pytest.raises(error, match=text) as caught:
        getattr(dist, method)(*arguments)
    assert type(caught.value) is error
    assert engine.calls == [("start",)]


def test_link_hands_over_plain_numbers(make: Make) -> None:
    dist, engine = make()
    assert dist.link("c", {np.uint64(2**64 - 1): np.int8(0), 2: 2**32 - 1}, "{}") == 1  # type: ignore[dict-item]
    (_, name, ranks, table) = engine.calls[-1]
    assert (name, ranks, table) == ("c", {2**64 - 1: 0, 2: 2**32 - 1}, "{}")
    assert {type(number) for pair in ranks.items() for number in pair} == {int}
    assert dist.query_register_mem_status(np.int32(1)) is RegisterMemStatus.PREPARING  # type: ignore[arg-type]
    assert dist.unlink(1) is None
    assert engine.calls[-2:] == [("comm_status", 1), ("unlink_comm", 1)]


@pytest.mark.rule("4.81")
@pytest.mark.parametrize(
    ("options", "listen"),
    [
        ((), None),
        ((None,), None),
        (({},), None),
        (({"llm.somethingElse": 5, "ge.exec.deviceId": "0"},), None),
        (({"llm.listenIpInfo": "[fe80::1%eth0]:0", "x": None},), ("fe80::1%eth0", 0)),
        (({"llm.listenIpInfo": ":26000"},), ("0.0.0.0", 26000)),
    ],
)
def test_switch_role_hands_over_where_to_listen(options: tuple[Any, ...], listen: Any, make: Make) -> None:
    dist, engine = make()
    dist.switch_role(LLMRole.PROMPT, *options)
    assert engine.calls[-1] == ("switch_role", LLMRole.PROMPT, listen)
    assert dist.role is LLMRole.PROMPT


def test_switch_role_refused_keeps_the_role(make: Make) -> None:
    dist, engine = make()
    engine.switch_error = LLMException("links", status_code=LLMStatusCode.LLM_EXIST_LINK)
    with pytest.raises(LLMException, match="links"):
        dist.switch_role(LLMRole.MIX)
    assert dist.role is LLMRole.DECODER


def test_drain_hands_over_its_time(make: Make) -> None:
    dist, engine = make()
    assert dist.drain(np.int32(5)) is None  # type: ignore[arg-type]
    assert engine.calls[-1] == ("drain", 5)


@pytest.mark.rule("4.48")
@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("link", "(self, comm_name: 'str', cluster_rank_info: 'dict[int, int]', rank_table: 'str') -> 'int'"),
        ("unlink", "(self, comm_id: 'int') -> 'None'"),
        ("query_register_mem_status", "(self, comm_id: 'int') -> 'RegisterMemStatus'"),
        (
            "switch_role",
            "(self, role: 'LLMRole', switch_options: 'dict[str, str] | None' = None) -> 'None'",
        ),
        ("drain", "(self, timeout_ms: 'int') -> 'None'"),
    ],
)
def test_section_4_signatures(method: str, signature: str) -> None:
    assert str(inspect.signature(getattr(LLMDataDist, method))) == signature


NEEDED = inspect.Parameter.empty


@pytest.mark.rule("4.5")
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("link_clusters", [("clusters", NEEDED), ("timeout", 3000)]),
        ("unlink_clusters", [("clusters", NEEDED), ("timeout", 3000), ("force", False)]),
        ("check_link_status", [("remote_cluster_id", NEEDED)]),
        ("link_error", [("remote_cluster_id", NEEDED)]),
        ("send_notify", [("remote_cluster_id", NEEDED), ("name", NEEDED), ("message", NEEDED)]),
        ("get_notifies", []),
        ("links", []),
        ("init", [("options", NEEDED)]),
        ("finalize", []),
        ("__init__", [("role", NEEDED), ("cluster_id", NEEDED)]),
    ],
)
def test_section_4_arguments_and_defaults(method: str, arguments: list[tuple[str, Any]]) -> None:
    parameters = list(inspect.signature(getattr(LLMDataDist, method)).parameters.values())[1:]
    assert [(p.name, p.default) for p in parameters] == arguments
