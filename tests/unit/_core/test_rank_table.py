"""Rank tables (contract section 4): what is read, in which order, and what is refused, by its JSON path."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist._core.rank_table import read_comm, read_rank_table
from llm_datadist.status import ParamInvalidError
from tests.support.rank_tables import device, rank_table, server

RANKS = {11: 0, 22: 1}


def entries(*servers: dict[str, Any], wanted: tuple[int, ...] = (0, 1), base_port: str | None = None) -> Any:
    return read_rank_table(rank_table(*servers), base_port, wanted)


@pytest.mark.rule("4.62")
def test_section_4_addresses_in_their_order() -> None:
    full = server(device(0, 0, device_ip="10.0.0.1"), device(1, 1), server_id="10.2.0.1", host_ip="10.1.0.1")
    found = entries(full)
    assert found[0].hosts == ("10.0.0.1", "10.1.0.1", "10.2.0.1", "127.0.0.1")
    assert found[1].hosts == ("10.1.0.1", "10.2.0.1", "127.0.0.1")


@pytest.mark.rule("4.62")
def test_section_4_loopback_only_with_one_server_and_names_are_no_addresses() -> None:
    assert entries(server(device(0, 0), device(1, 1), server_id="node-7"))[0].hosts == ("127.0.0.1",)
    two = [server(device(r, r), server_id=f"10.0.0.{r + 1}") for r in (0, 1)]
    assert [entries(*two)[r].hosts for r in (0, 1)] == [("10.0.0.1",), ("10.0.0.2",)]


@pytest.mark.parametrize("given", ["::1", "0:0:0:0:0:0:0:1", "0000::0001"])
def test_one_address_in_several_spellings_is_one(given: str) -> None:
    one = server(device(0, 0, device_ip=given), device(1, 1), host_ip="::1", server_id="x")
    assert entries(one)[0].hosts == ("::1", "127.0.0.1")


def test_a_scope_is_kept() -> None:
    assert entries(server(device(0, 0, device_ip="fe80::1%eth0"), device(1, 1)))[0].hosts[0] == "fe80::1%eth0"


@pytest.mark.parametrize("nothing", [None, "", "0.0.0.0", "::"])
def test_no_address_in_other_words(nothing: str | None) -> None:
    one = server(device(0, 0, device_ip=nothing), device(1, 1), host_ip=nothing, server_id=nothing)
    assert entries(one)[0].hosts == ("127.0.0.1",)


@pytest.mark.rule("4.64")
@pytest.mark.parametrize(
    ("first", "base_port", "port"),
    [
        (device(4, 0), None, 60004),
        (device("4", 0), "", 60004),
        (device(4, 0), "30000", 30004),
        (device(4, 0, listen_port=26000), "30000", 26000),
        (device(4, 0, listen_port="26000"), None, 26000),
        (device("0", 0, listen_port=65535), None, 65535),
        (device(0, 0, listen_port=1), "not looked at", 1),
    ],
)
def test_section_4_ports(first: dict[str, Any], base_port: str | None, port: int) -> None:
    assert entries(server(first, device(9, 1, listen_port=9)), base_port=base_port)[0].port == port


@pytest.mark.rule("4.59", "4.60")
def test_section_4_numbers_as_text_and_what_else_a_table_has() -> None:
    text = json.dumps(
        {
            "server_list": [
                {**server(device("0", "0"), device("1", "1")), "container_ip": "x"},
            ],
            "version": "1.2",
            "status": "completed",
            "server_count": "1",
            "super_pod_list": [{"super_pod_id": "0"}],
        }
    )
    assert sorted(read_rank_table(text, None, [0, 1])) == [0, 1]


@pytest.mark.rule("4.65")
def test_who_dials_whom() -> None:
    table = rank_table(server(*(device(r, r) for r in range(4))))
    comm = read_comm(30, "c", {10: 0, 20: 1, 30: 2, 40: 3}, table, None)
    assert comm.mine.rank == 2
    assert {c: e.rank for c, e in comm.dialled.items()} == {10: 0, 20: 1}
    assert {c: e.rank for c, e in comm.awaited.items()} == {40: 3}


def _without(path: str) -> Callable[[dict[str, Any]], None]:
    def remove(table: dict[str, Any]) -> None:
        at: Any = table
        *way, last = path.split(".")
        for step in way:
            at = at[int(step)] if step.isdigit() else at[step]
        del at[last]

    return remove


def _with(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def put(table: dict[str, Any]) -> None:
        at: Any = table
        *way, last = path.split(".")
        for step in way:
            at = at[int(step)] if step.isdigit() else at[step]
        at[int(last) if last.isdigit() else last] = value

    return put


D1 = "server_list.0.device.1"
BAD_TABLES = [
    (_without("server_list"), "server_list is missing"),
    (_with("server_list", []), r"server_list is \[\]; it must be a list with entries"),
    (_with("server_list", {}), "server_list is {}"),
    (_with("server_list.0", 5), r"server_list\[0\] is 5; it must be a JSON object"),
    (_without("server_list.0.device"), r"server_list\[0\]\.device is missing"),
    (_with("server_list.0.device", []), r"server_list\[0\]\.device is \[\]"),
    (_with(D1, "x"), r"server_list\[0\]\.device\[1\] is 'x'; it must be a JSON object"),
    (_without(f"{D1}.rank_id"), r"server_list\[0\]\.device\[1\]\.rank_id is missing"),
    (_with(f"{D1}.rank_id", "x"), r"server_list\[0\]\.device\[1\]\.rank_id is 'x'; it must be a number >= 0"),
    (_with(f"{D1}.rank_id", -1), r"device\[1\]\.rank_id is -1"),
    (_with(f"{D1}.rank_id", 1.0), r"device\[1\]\.rank_id is 1\.0"),
    (_with(f"{D1}.rank_id", True), r"device\[1\]\.rank_id is True"),
    (_with(f"{D1}.rank_id", None), r"device\[1\]\.rank_id is None"),
    (_with(f"{D1}.rank_id", "\uff11"), r"device\[1\]\.rank_id is '\uff11'"),
    (_with(f"{D1}.rank_id", 0), r"device\[1\]\.rank_id is 0, as is that of server_list\[0\]\.device\[0\]"),
    (_with(f"{D1}.rank_id", 2), r"server_list\[\]\.device\[\]\.rank_id is 1, .*ranks \[0, 2\]"),
    (_without(f"{D1}.device_id"), r"device\[1\]\.device_id is missing"),
    (_with(f"{D1}.device_id", "a"), r"device\[1\]\.device_id is 'a'"),
    (_with(f"{D1}.device_id", 5536), r"device\[1\]\.device_id is 5536: .*60000 \(HCCL_IF_BASE_PORT\).*65536"),
    (_with(f"{D1}.device_ip", "h0st"), r"server_list\[0\]\.device\[1\]\.device_ip is 'h0st'; .*IP address"),
    (_with(f"{D1}.device_ip", 7), r"device\[1\]\.device_ip is 7"),
    (_with("server_list.0.host_ip", "host"), r"server_list\[0\]\.host_ip is 'host'"),
    (_with(f"{D1}.listen_port", 0), r"device\[1\]\.listen_port is 0; it must lie in 1\.\.65535"),
    (_with(f"{D1}.listen_port", 65536), r"device\[1\]\.listen_port is 65536"),
    (_with(f"{D1}.listen_port", "x"), r"device\[1\]\.listen_port is 'x'"),
    (_with(f"{D1}.listen_port", 10**30), r"device\[1\]\.listen_port is 10+"),
    (
        _with(f"{D1}.device_id", 0),
        r"device\[0\] and .*device\[1\] \(ranks 0 and 1\) both have the address 127\.0\.0\.1 and port 60000",
    ),
]


@pytest.mark.rule("4.61", "4.68")
@pytest.mark.parametrize(("change", "text"), BAD_TABLES)
def test_l3_a_bad_table_is_refused_by_its_path(change: Callable[[dict[str, Any]], None], text: str) -> None:
    table = copy.deepcopy(json.loads(rank_table(server(device(0, 0), device(1, 1)))))
    change(table)
    with pytest.raises(ParamInvalidError, match=text):
        read_comm(11, "c", RANKS, json.dumps(table), None)


def test_l3_a_rank_without_an_address_on_two_servers() -> None:
    servers = [server(device(0, 0, device_ip="10.0.0.1"), server_id="a"), server(device(1, 1), server_id="b")]
    with pytest.raises(
        ParamInvalidError, match=r"server_list\[1\]\.device\[0\]\.device_ip is missing, and rank 1"
    ):
        entries(*servers)


def test_what_does_not_take_part_is_not_judged() -> None:
    servers = [
        server(device(0, 0), device(1, 1), server_id="10.0.0.1"),
        server(device(99999, 2, device_ip="nonsense", listen_port=0), server_id="b"),
    ]
    assert sorted(entries(*servers)) == [0, 1]


@pytest.mark.rule("4.58")
@pytest.mark.parametrize(
    "text", ["", "{", "nonsense", "[]", "5", "null", '"x"', "[" * 100_000, '{"server_list": NaN']
)
def test_l3_a_text_that_is_no_json_object(text: str) -> None:
    with pytest.raises(ParamInvalidError, match="rank_table"):
        read_comm(11, "c", RANKS, text, None)


def test_a_text_beyond_all_reason_is_not_read() -> None:
    with pytest.raises(ParamInvalidError, match="rank_table has 4194305 characters"):
        read_comm(11, "c", RANKS, " " * (4 << 20) + "x", None)


@pytest.mark.parametrize("text", ["x", "-1", "70000", "60000.0", "\uff16"])
def test_a_bad_base_port_is_named_where_it_is_needed(text: str) -> None:
    with pytest.raises(ParamInvalidError, match=f"HCCL_IF_BASE_PORT was '{text}' at init"):
        entries(server(device(0, 0), device(1, 1)), base_port=text)


@pytest.mark.rule("4.68")
@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"device_ip": "10.0.0.1"}, {"device_ip": "10.0.0.1"}, "10.0.0.1"),
        ({"device_ip": "10.0.0.1"}, {"device_ip": "10.0.0.2"}, None),
        ({"device_ip": "10.0.0.1"}, {}, None),  # the other one has loopback to itself
        ({"device_ip": "127.0.0.1"}, {"device_ip": "10.0.0.2"}, None),
        ({"device_ip": "127.0.0.1"}, {}, "127.0.0.1"),
        ({"device_ip": "::1"}, {"device_ip": "0::1"}, "::1"),
    ],
)
def test_section_4_two_ranks_on_one_address_and_port(
    first: dict[str, str], second: dict[str, str], refused: str | None
) -> None:
    one = server(
        device(0, 0, listen_port=26000, **first), device(1, 1, listen_port=26000, **second), server_id="n"
    )
    if refused is None:
        assert entries(one)[1].port == 26000
        return
    with pytest.raises(ParamInvalidError, match=f"ranks 0 and 1.*{refused} and port 26000"):
        entries(one)


def test_section_4_one_host_ip_is_one_address() -> None:
    one = server(
        device(0, 0, device_ip="10.0.0.1", listen_port=5), device(1, 1, device_ip="10.0.0.2", listen_port=5),
        host_ip="10.1.0.1",
    )  # fmt: skip
    with pytest.raises(ParamInvalidError, match=r"10\.1\.0\.1 and port 5"):
        entries(one)


@pytest.mark.rule("4.54", "4.55", "4.56", "4.57")
@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("", RANKS, "comm_name has 0 characters"),
        ("x" * 128, RANKS, "comm_name has 128 characters; it must have 1 to 127"),
        ("c", {11: 0}, "cluster_rank_info has 1 clusters; a link takes 2 to 4"),
        ("c", {10 + r: r for r in range(5)}, "cluster_rank_info has 5 clusters"),
        ("c", {11: 1, 22: 0}, r"ranks \[1, 0\]; they must be ascending"),
        ("c", {11: 0, 22: 0}, r"ranks \[0, 0\]; they must be ascending, each once"),
        ("c", {12: 0, 22: 1}, "lacks this cluster, 11"),
    ],
)
def test_section_4_arguments_against_each_other(name: str, ranks: dict[int, int], text: str) -> None:
    with pytest.raises(ParamInvalidError, match=text):
        read_comm(11, name, ranks, rank_table(server(device(0, 0), device(1, 1))), None)


@pytest.mark.rule("4.54")
@pytest.mark.parametrize("name", ["x", "x" * 127])
def test_names_at_the_ends_of_their_range(name: str) -> None:
    assert read_comm(11, name, RANKS, rank_table(server(device(0, 0), device(1, 1))), None).mine.rank == 0
