"""Transport ``nixl`` with agents that are not NIXL's: what peers may tell, and what comes of lies."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist.transports import _nixl
from llm_datadist.transports.nixl_session import Source
from llm_datadist.transports.nixl_told import ID_NBYTES, Endpoint, Token, source_of
from llm_datadist.transports.seam import FaultKind, TransportUnavailable
from tests.support.fake_nixl import written
from tests.support.local_pair import PROOF
from tests.support.nixl_rig import SIZE, Rig, endpoint, kind_of, region


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def _changed(**changes: Any) -> Callable[[bytes], bytes]:
    def change(token: bytes) -> bytes:
        told = msgspec.structs.replace(msgspec.msgpack.decode(token[ID_NBYTES:], type=Token), **changes)
        return token[:ID_NBYTES] + msgspec.msgpack.encode(told)

    return change


@pytest.mark.parametrize(
    "lie",
    [
        lambda token: b"",
        lambda token: token[:5],
        lambda token: token[:-1],
        lambda token: token[:ID_NBYTES] + b"\xff" * 100,
        _changed(agent="another"),
        _changed(metadata=b""),
        _changed(metadata=b"nixlSerDes|Agent" + (1 << 60).to_bytes(8, "little") + b"x"),
        _changed(metadata=b"nixlSerDes|Agent" + (3).to_bytes(8, "little") + b"abc|"),
        _changed(memory="npu"),
        _changed(memory="cuda:one"),
        _changed(memory="cuda:" + "9" * 5000),
        _changed(memory="cuda:1"),
        _changed(rows=b"123"),
    ],
)
def test_a_token_that_is_no_good_is_left_out(rig: Rig, lie: Callable[[bytes], bytes]) -> None:
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    rig.channel.admit(lie(token))
    assert not rig.channel.covers(rig.plan().source)
    assert kind_of(rig.read()) is FaultKind.SOURCE
    assert [agent.loads for agent in rig.world.readers()] == [1], "NIXL never sees it"
    other = rig.owner.register(region(rig.source, nbytes=SIZE))
    rig.channel.admit(other)
    rig.check()


@pytest.mark.rule("S.40")
def test_g16_ranges_that_the_metadata_do_not_have_are_left_out(rig: Rig) -> None:
    """NIXL and we believe the same of it."""
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    rows = np.array([[rig.source, rig.source + 3 * SIZE]], dtype="<u8").tobytes()
    rig.channel.admit(_changed(rows=rows)(token))
    assert not rig.channel.covers(rig.plan().source)
    assert kind_of(rig.read(0, 3 * SIZE)) is FaultKind.SOURCE
    assert not rig.here.any()
    rig.channel.admit(rig.owner.register(region(rig.source, nbytes=2 * SIZE)))
    rig.check()


@pytest.mark.rule("S.43")
def test_g16_a_connection_comes_with_the_endpoint_alone(rig: Rig) -> None:
    """What has another in it, of whatever agent in the name of the peer, NIXL never sees."""
    row = [rig.source, rig.source + SIZE]
    name = rig.owner._serving.name
    rows, metadata = np.array([row], dtype="<u8").tobytes(), written(name, "host", [row], [1], True)
    token = Token(agent=name, memory="host", rows=rows, metadata=metadata)
    rig.channel.admit(bytes(ID_NBYTES) + msgspec.msgpack.encode(token))
    assert kind_of(rig.read()) is FaultKind.SOURCE
    assert [agent.loads for agent in rig.world.readers()] == [1]


@pytest.mark.rule("S.41")
@pytest.mark.parametrize("within_host", [True, False])
def test_g16_what_processes_of_a_host_share_is_for_peers_of_this_host(rig: Rig, within_host: bool) -> None:
    """Which process UCX reads there, the address that the peer has given says."""
    told = dataclasses.replace(endpoint(rig.owner.endpoint(PROOF)), within_host=within_host)
    before = len(rig.world.made)
    rig.reader.open(told, deadline=time.monotonic() + 10).close()
    (made,) = rig.world.made[before:]
    assert made.within_host is within_host
    assert rig.owner._serving.within_host  # type: ignore[attr-defined]


@pytest.mark.rule("S.41")
def test_g16_ucx_shares_nothing_with_peers_of_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has said what it may use."""
    for name in (_nixl._CONNECT, _nixl._MEANS):
        monkeypatch.delenv(name, raising=False)
    assert _nixl._config(True) == {"engine_config": "TCP_CONN_NB=y"}
    assert _nixl._config(False) == {"engine_config": "TCP_CONN_NB=y,TLS=^sm"}
    monkeypatch.setenv(_nixl._MEANS, "rc")
    assert _nixl._config(False) == _nixl._config(True) == {"engine_config": "TCP_CONN_NB=y"}
    monkeypatch.setenv(_nixl._CONNECT, "n")
    assert _nixl._config(False) == {}


def test_memory_that_was_offered_is_all_that_a_peer_hears_of_before_it_has_a_link(rig: Rig) -> None:
    told = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=Endpoint)
    rig.owner.register(region(rig.source, nbytes=SIZE))
    later = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=Endpoint)
    assert (later.rows, later.metadata) == (told.rows, told.metadata)
    ((start, end),) = np.frombuffer(told.rows, dtype="<u8").reshape(-1, 2).tolist()
    assert (
        start <= told.proof_address < told.nonce_address + 2 * SIZE and end - start == rig.owner._page.nbytes
    )


@pytest.mark.parametrize("blob", [b"", b"garbage", msgspec.msgpack.encode({"agent": "x"})])
def test_an_endpoint_that_is_no_good_is_a_reason(rig: Rig, blob: bytes) -> None:
    with pytest.raises(TransportUnavailable, match="not valid"):
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)


@pytest.mark.parametrize("place", ["proof_address", "nonce_address"])
def test_g16_an_endpoint_whose_proof_is_elsewhere_is_a_reason(rig: Rig, place: str) -> None:
    told = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=Endpoint)
    blob = msgspec.msgpack.encode(msgspec.structs.replace(told, **{place: rig.source}))
    with pytest.raises(TransportUnavailable, match="its proof is not in what it tells of"):
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)


def test_g17_what_is_told_at_once_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    told = msgspec.msgpack.decode(token[ID_NBYTES:], type=Token)
    for name, most in {"NIXL_TENSORS": 1, "NIXL_METADATA_NBYTES": len(told.metadata)}.items():
        monkeypatch.setattr(limits, name, most)
        assert isinstance(source_of(b"", told.agent, told.memory, told.rows, told.metadata, 1), Source)
        monkeypatch.setattr(limits, name, most - 1)
        assert "of ranges and" in str(source_of(b"", told.agent, told.memory, told.rows, told.metadata, 1))
        monkeypatch.undo()


def test_g16_another_proof_is_another_process(rig: Rig) -> None:
    blob = rig.owner.endpoint(PROOF)
    rig.owner.hide(PROOF)
    with pytest.raises(TransportUnavailable, match="another process"):
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)
    with pytest.raises(TransportUnavailable, match="this very connection"):
        rig.reader.open(endpoint(rig.owner.endpoint(PROOF[::-1])), deadline=time.monotonic() + 1)


def test_a_peer_that_nobody_can_connect_to_is_a_reason(rig: Rig) -> None:
    rig.world.unreachable |= {rig.owner._serving.name}
    with pytest.raises(TransportUnavailable, match="cannot be reached with NIXL"):
        rig.open()
