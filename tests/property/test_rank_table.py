"""Rank tables of any content: a plan that holds what the contract says, or LLM_PARAM_INVALID, nothing else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._core.rank_table import read_comm, read_rank_table
from llm_datadist.status import ParamInvalidError
from tests.support.rank_tables import device, rank_table, server

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70000), st.floats(), st.text(max_size=5),
    st.sampled_from(["127.0.0.1", "::1", "10.0.0.1", "0", "1", "65536", "0.0.0.0", "fe80::1%x"]),
)  # fmt: skip
JSON = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
DEVICE = st.fixed_dictionaries(
    {}, optional={name: ODD | JSON for name in ("device_id", "rank_id", "device_ip", "listen_port")}
)
SERVER = st.fixed_dictionaries(
    {},
    optional={
        "server_id": ODD, "host_ip": ODD, "device": st.lists(DEVICE | JSON, max_size=3) | JSON,
    },
)  # fmt: skip
TABLE = st.fixed_dictionaries({}, optional={"server_list": st.lists(SERVER | JSON, max_size=3) | JSON})


@settings(max_examples=500)
@given(table=TABLE | JSON, base_port=st.none() | st.text(max_size=6))
def test_any_json_is_a_plan_or_param_invalid(table: Any, base_port: str | None) -> None:
    with contextlib.suppress(ParamInvalidError):
        comm = read_comm(1, "c", {1: 0, 2: 1}, json.dumps(table), base_port)
        for entry in (comm.mine, *comm.dialled.values(), *comm.awaited.values()):
            assert entry.hosts and all(entry.hosts) and 0 < entry.port < 65536


@settings(max_examples=200)
@given(text=st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_param_invalid(text: str) -> None:
    with contextlib.suppress(ParamInvalidError):
        read_rank_table(text, None, [0])
        raise AssertionError("a short text is no table")


@st.composite
def _good(draw: Any) -> tuple[str, list[int], dict[int, tuple[str, int]]]:
    """A table in which each rank has an address and port of its own; its ranks; where each is."""
    ranks = draw(st.lists(st.integers(0, 999), min_size=2, max_size=8, unique=True))
    as_text = draw(st.booleans())
    servers: dict[int, list[dict[str, Any]]] = {}
    where = {}
    for at, rank in enumerate(ranks):
        number = draw(st.integers(0, 2))
        ip, port = f"10.{number}.{at}.1", draw(st.none() | st.integers(1, 65535))
        more = {"device_ip": ip} | ({} if port is None else {"listen_port": str(port) if as_text else port})
        shown = (str(at), str(rank)) if as_text else (at, rank)
        servers.setdefault(number, []).append(device(*shown, **more))
        where[rank] = ip, 60000 + at if port is None else port
    return rank_table(*(server(*devices) for devices in servers.values())), ranks, where


@given(good=_good(), data=st.data())
def test_a_good_table_gives_each_side_the_same_picture(good: Any, data: st.DataObject) -> None:
    text, ranks, where = good
    chosen = sorted(data.draw(st.lists(st.sampled_from(ranks), min_size=2, max_size=4, unique=True)))
    clusters = {2**63 + rank: rank for rank in chosen}
    comms = {c: read_comm(c, "c", clusters, text, None) for c in clusters}
    for cluster_id, rank in clusters.items():
        comm = comms[cluster_id]
        assert (comm.mine.hosts[0], comm.mine.port) == where[rank]
        assert {clusters[c] for c in comm.dialled} == {r for r in chosen if r < rank}
        for other, entry in comm.dialled.items():
            assert entry == comms[other].mine
            assert cluster_id in comms[other].awaited
