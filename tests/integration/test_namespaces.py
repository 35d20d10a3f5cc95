"""Rows N1 and N3, and rank tables, between two hosts: namespaces with a veth pair, D without loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.netns import Namespace, joined
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, of_model
from tests.support.pool import Spawner
from tests.support.rank_tables import device, rank_table, server
from tests.support.world import World, wait_until

Nets = tuple[Namespace, Namespace]
PORT = 26000


@pytest.fixture
def nets(_leaves_nothing: None) -> Iterator[Nets]:
    """P's and D's namespace; they outlive the processes in them."""
    with joined(slow=False, loopback=False) as both:
        yield both


@pytest.fixture
def hosts(nets: Nets, spawn: Spawner) -> Any:
    """Makes P and D, one in each, not initialised."""
    return lambda mode, backend="tcp": Pair(
        spawn(prefix=nets[0].prefix), spawn(prefix=nets[1].prefix), Combo(mode, backend)
    )


def scoped(net: Namespace) -> str:
    """The link-local address of a namespace's end, with its scope; usable at once (no duplicate check)."""
    show = ["ip", "-n", net.name, "-6", "-o", "addr", "show", "dev", net.device, "scope", "link"]

    def look() -> list[str]:
        return subprocess.run(show, check=True, capture_output=True, text=True).stdout.split()

    assert wait_until(lambda: "inet6" in look() and "tentative" not in look())
    words = look()
    return words[words.index("inet6") + 1].split("/")[0]


def addresses_used(net: Namespace) -> set[str]:
    """Both ends of every TCP connection in a namespace."""
    lines = subprocess.run(
        [*net.prefix, "ss", "-Htn", "state", "established"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {end.rpartition(":")[0].strip("[]") for line in lines for end in line.split()[-2:]}


def up(pair: Pair, listen: str, **more: str) -> int:
    mode, backend = pair.combo.mode, pair.combo.backend
    _, port = pair.p.call(actors.up, P_ID, actors.options(mode, backend, listen, **more))
    pair.d.call(actors.up, D_ID, actors.options(mode, backend))
    register(pair)
    return int(port)


def register(pair: Pair) -> None:
    for at, peer in enumerate((pair.p, pair.d)):
        peer.call(actors.blocks_cache, "src", seed=20 + at, model_id=0)
        peer.call(actors.blocks_cache, "dst", model_id=1)


def moves_both_ways(pair: Pair) -> None:
    """Pulls by both sides and, in mode B, pushes by both; every byte compared."""
    sides = ((pair.p, P_ID, pair.d, D_ID), (pair.d, D_ID, pair.p, P_ID))
    for at, (_, owner_id, reader, _) in enumerate(sides):
        reader.call(actors.pull_blocks, of_model(0, owner_id), "dst", [1, 3], [2, 5])
        pieces = [([1024, 3 * 1024], [2 * 1024, 5 * 1024], 1024)]
        assert not reader.call(actors.compare, "dst", seed=20 + at, src_tensor_nbytes=8192, pieces=pieces)
        reader.call(actors.refill, "dst", None)
    if pair.combo.mode == "A":
        return
    for at, (owner, _, target, target_id) in enumerate(sides):
        owner.call(actors.push_blocks, of_model(1, target_id), "src", [0, 7], [7, 0])
        pieces = [([0, 7 * 1024], [7 * 1024, 0], 1024)]
        assert not target.call(actors.compare, "dst", seed=20 + at, src_tensor_nbytes=8192, pieces=pieces)


@pytest.mark.rule("4.12", "4.110", "4.112")
@pytest.mark.parametrize(
    ("mode", "listen"), [("A", "0.0.0.0:0"), ("B", "[::]:0"), ("A", ":0")]
)  # the mode plays no part before the first transfer
def test_n3_the_bind_address_is_never_the_address_to_dial(
    nets: Nets, hosts: Any, listen: str, mode: str
) -> None:
    pair = hosts(mode)
    port = up(pair, listen)
    assert port > 0
    assert pair.d.call(actors.link, [(P_ID, (nets[0].address, port))]) == (SUCCESS, [SUCCESS])
    moves_both_ways(pair)
    for net in nets:
        assert addresses_used(net) <= {form for n in nets for form in (n.address, f"::ffff:{n.address}")}


@pytest.mark.rule("R.1", "R.19")
def test_n3_auto_takes_tcp_between_hosts(nets: Nets, hosts: Any) -> None:
    pair = hosts("B", "auto")
    port = up(pair, "0.0.0.0:0")
    assert pair.d.call(actors.link, [(P_ID, (nets[0].address, port))]) == (SUCCESS, [SUCCESS])
    assert [t for _, t, _ in pair.d.call(actors.links)] == ["tcp"]
    moves_both_ways(pair)


@pytest.mark.parametrize("wildcard", [False, True])
def test_n1_a_link_local_address_with_its_scope(nets: Nets, hosts: Any, wildcard: bool) -> None:
    pair = hosts("B")
    host = scoped(nets[0])
    scoped(nets[1])  # it dials from that
    port = up(pair, "[::]:0" if wildcard else f"[{host}%{nets[0].device}]:0")
    if not wildcard:
        assert pair.p.call(_listen_host) == f"{host}%{nets[0].device}"
    dial = f"{host}%{nets[1].device}"
    assert pair.d.call(actors.link, [(P_ID, (f"[{dial}]" if wildcard else dial, port))]) == (
        SUCCESS,
        [SUCCESS],
    )
    moves_both_ways(pair)


def _listen_host(w: World) -> str:
    return str(w.dist.listen_address[0])


def test_n1_a_scope_that_does_not_exist(hosts: Any) -> None:
    pair = hosts("A")
    values = actors.options("A", "tcp", "[fe80::1%nowhere]:0")
    pair.p.attempt(actors.up, P_ID, values).expect(LLMStatusCode.LLM_FAILED, "[fe80::1%nowhere]:0")


@pytest.mark.rule("4.110")
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_n1_both_families_on_one_port(nets: Nets, hosts: Any, family: str) -> None:
    pair = hosts("B")
    scoped(nets[0]), scoped(nets[1])
    port = up(pair, f"[::]:{PORT}")
    assert port == PORT
    host = nets[0].address if family == "v4" else f"{scoped(nets[0])}%{nets[1].device}"
    assert pair.d.call(actors.link, [(P_ID, (host, port))]) == (SUCCESS, [SUCCESS])
    moves_both_ways(pair)


@pytest.mark.rule("4.64", "4.65")
def test_n3_a_rank_table_of_two_servers(nets: Nets, hosts: Any) -> None:
    """The devices' own addresses lead nowhere, as those of cards do; the hosts' do."""
    pair = hosts("B")
    for peer, cluster_id in ((pair.p, P_ID), (pair.d, D_ID)):
        peer.call(actors.up, cluster_id, actors.options("B", "tcp", LinkTotalTime="20"))
    register(pair)
    table = rank_table(
        *(
            server(device(rank, rank, device_ip=f"192.0.2.{rank + 1}"), server_id="n", host_ip=net.address)
            for rank, net in enumerate(nets)
        )
    )
    ids = [peer.call(_comm, table) for peer in (pair.p, pair.d)]
    for peer, comm_id, net, port in zip((pair.p, pair.d), ids, nets, (60000, 60001), strict=True):
        assert wait_until(lambda peer=peer, comm_id=comm_id: peer.call(_status, comm_id) == "OK", 8.0)
        assert peer.call(_listens) == (net.address, port)
    moves_both_ways(pair)


def _comm(w: World, table: str) -> int:
    return int(w.dist.link("c", {P_ID: 0, D_ID: 1}, table))


def _status(w: World, comm_id: int) -> str:
    return str(w.dist.query_register_mem_status(comm_id).name)


def _listens(w: World) -> Any:
    return w.dist.listen_address


@pytest.mark.rule("4.111", "4.112")
@pytest.mark.parametrize("advertised", [None, "198.51.100.7"])
def test_n3_only_advertise_ip_is_told(nets: Nets, hosts: Any, advertised: str | None) -> None:
    pair = hosts("A")
    port = up(pair, "0.0.0.0:0", **({} if advertised is None else {"AdvertiseIp": advertised}))
    pair.d.call(actors.watch_logs)
    assert pair.d.call(actors.link, [(P_ID, (nets[0].address, port))]) == (SUCCESS, [SUCCESS])
    moves_both_ways(pair)
    told = pair.d.call(_told)
    assert told == ("" if advertised is None else f"{advertised}:{port}")
    ups = [text for _, _, text in pair.d.call(actors.log_records, "INFO") if "is up" in text]
    assert len(ups) == 1 and (advertised or "is up") in ups[0]
    assert "0.0.0.0" not in ups[0] and "127." not in ups[0]


def _told(w: World) -> str:
    return str(w.dist._engine._state.links.links()[0].identity.listens_at)


def test_n3_a_loopback_address_is_not_advertised_silently(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.watch_logs)
    peer.call(actors.up, P_ID, actors.options(listen="127.0.0.1:0", AdvertiseIp="127.0.0.1"))
    (record,) = peer.call(actors.log_records, "WARNING")
    assert "llm.AdvertiseIp is 127.0.0.1" in record[2]
