"""Rows Z: nothing foreign is executed, believed or written where it may not."""

from __future__ import annotations

import ast
import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Taken
from tests.support import actors
from tests.support.pair import D_ID, P_ID, SUCCESS, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.sockets import is_closed_by_peer
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
SRC = Path(__file__).resolve().parents[2] / "src"
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
LISTEN = "0A"


def _dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found += [n for n in names if n.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in FORBIDDEN_CALLS else []
    return found


@pytest.mark.rule("4.107")
@pytest.mark.rule("S.3")
def test_z1_nothing_that_a_peer_sends_can_be_executed() -> None:
    assert _dangers("import pickle\neval('1')") == ["pickle", "eval"]
    bad = {str(p): d for p in SRC.rglob("*.py") if (d := _dangers(p.read_text()))}
    assert not bad


@pytest.mark.rule("3.31", "4.109")
@pytest.mark.rule("S.9")
def test_z1_only_the_given_port_is_open(spawn: Spawner) -> None:
    peer = spawn()
    assert peer.call(_listening) == []
    peer.call(actors.up, P_ID, actors.options())
    assert peer.call(_listening) == []
    peer.call(actors.finalize)
    address = peer.call(actors.up, P_ID, actors.options(listen="127.0.0.1:0"))
    assert peer.call(_listening) == [("0100007F", address[1])]


def _listening(w: World) -> list[tuple[str, int]]:
    """Listening TCP sockets of this process, as the kernel writes them."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        with open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
        for row in rows:
            host, port = row[1].split(":")
            if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes:
                found.append((host, int(port, 16)))
    return found


# ---- Z3 -------------------------------------------------------------------------------------------


def _nonsense(frames: int) -> list[bytes]:
    """First bytes that no peer of ours sends; every one must lead to a closed connection."""
    rng = random.Random(5)
    nested = b"\x91" * 100_000 + b"\xc0"
    fixed = [
        struct.pack("<Q", 2**63) + b"x" * 64,
        struct.pack(">Q", 2**63) + b"x" * 64,
        b"\xff" * 64,
        struct.pack("<II", 2**32 - 1, 2**32 - 1) + b"\xdd\xff\xff\xff\xff" * 20,
        struct.pack("<qq", -1, -1) * 8,
        struct.pack("<I", len(nested)) + nested,
        nested,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    return fixed + [rng.randbytes(rng.randrange(64, 2048)) for _ in range(frames)]


@pytest.mark.parametrize(
    "frames", [150, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
@pytest.mark.rule("S.4")
def test_z3_numbers_from_the_wire_are_not_believed(pair: Pair, frames: int) -> None:
    pair.up()
    shape = Shape(dim0=64, stride=65536)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    blocks = list(range(64))
    pair.p.call(actors.watch_logs)
    loop = pair.d.start(actors.pull_loop, of_model(0), "dst", blocks, blocks, "stop")
    before = pair.p.call(actors.rss_nbytes)
    for data in _nonsense(frames):
        with socket.create_connection(pair.address) as sock:
            _send(sock, data)
            assert is_closed_by_peer(sock, 2.0), f"still open after {data[:32]!r}"
    for cut in (1, 3, 5, 9):
        with socket.create_connection(pair.address) as sock:
            _send(sock, b"\x00" * cut)
    pair.d.call(actors.raise_flag, "stop")
    pulls = loop.outcome()
    count, longest = pulls.ok()
    assert count > 0 and Taken(longest, pulls.took.stalled).within(1.0)
    assert pair.p.call(actors.rss_nbytes) - before <= 16 << 20
    assert not [r for r in pair.p.call(actors.log_records) if "Traceback" in r[2]]
    pair.blocks_right(blocks, blocks)
    pair.d.call(actors.check_link, P_ID)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return  # closed already, which is right


@pytest.mark.parametrize("at", [0, 4, 8, 20, 60])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_z3_a_damaged_handshake(pair_a: Pair, at: int, damage: str) -> None:
    """The first bytes of a good handshake, recorded and sent again with one fault."""
    pair = pair_a.up()
    pair.source()
    pair.destination()
    hello = _recorded_hello(pair)
    broken = {
        "flip": hello[:at] + bytes([hello[at] ^ 0x80]) + hello[at + 1 :],
        "cut": hello[:at],
        "grow": hello[:at] + b"\xff" * 16 + hello[at:],
    }[damage]
    with socket.create_connection(pair.address) as sock:
        _send(sock, broken)
        sock.shutdown(socket.SHUT_WR)
        assert is_closed_by_peer(sock, 2.0)
    pair.d.call(actors.check_link, P_ID)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


def _recorded_hello(pair: Pair) -> bytes:
    """What D sends first to an address that only listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        dialling = pair.d.start(actors.link, [(77, listener.getsockname())], 1000)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(5)
            hello = sock.recv(65536)
    dialling.outcome()
    assert len(hello) > 60
    return hello


# ---- Z4 -------------------------------------------------------------------------------------------

FOUR = Shape(tensors=4, dim0=4, stride=256)


class _Layers(dd.LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def _push_to(w: World, addresses: list[int]) -> Any:
    config = dd.TransferConfig(D_ID, addresses, range(0, 2), 0)
    manager = w.dist.cache_manager
    task = manager.transfer_cache_async(w.held["src"].cache, _Layers(), [config])
    return task.get_results(10_000)


@pytest.mark.rule("4.113", "4.114")
@pytest.mark.parametrize("kind", ["outside", "one byte past", "not accessible", "unregistered", "across"])
@pytest.mark.rule("4.113", "4.114", "5.91")
@pytest.mark.rule("S.7", "S.19", "S.27")
def test_z4_a_peer_cannot_name_addresses_outside_accessible_caches(pair_a: Pair, kind: str) -> None:
    pair = pair_a.up()
    pair.source(shape=FOUR)
    pair.destination(shape=FOUR)
    pair.d.call(actors.make, "private", **FOUR.memory())
    good, private = (pair.d.call(_addresses, name) for name in ("dst", "private"))
    bad = private[3]
    if kind == "one byte past":
        bad = good[3] + FOUR.tensor_nbytes - FOUR.stride + 1
    elif kind == "across":
        bad = good[3] - 1
    elif kind == "not accessible":
        pair.d.call(actors.blocks_cache, "private", accessible=False)
    elif kind == "unregistered":
        pair.d.call(actors.blocks_cache, "private")
        pair.d.call(actors.unregister, "private")
    pair.d.call(actors.watch_logs)
    assert pair.p.call(_push_to, [*good[:3], bad]) == [INVALID]
    records = pair.d.call(actors.log_records)
    assert [r for r in records if str(P_ID) in r[2] and f"{bad:x}" in r[2]], records
    pair.unchanged()
    pair.unchanged("private")
    assert pair.p.call(_push_to, good) == [SUCCESS]
    pair.blocks_right([0], [0])
    pair.unchanged("private")


def _addresses(w: World, name: str) -> list[int]:
    return w.held[name].addresses
