"""Row G16: what a peer shows must be proven for its own connection. Real processes, and a client with TCP only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._wire.messages import Done, Refused, Welcome, Withdraw
from llm_datadist.transports.movers import Movers
from tests.support import actors
from tests.support.allocated import pool
from tests.support.engines import Engines
from tests.support.impostor import (
    SECRET,
    Impostor,
    has_no_link,
    holds_secret,
    impostor,
    keep_secret,
    open_destination,
    told,
)
from tests.support.local_pair import Loop, transport
from tests.support.peers import Peer
from tests.support.pool import Spawner
from tests.support.proxies import proxy

VICTIM, OTHER = 1, 2
FAILED = LLMStatusCode.LLM_LINK_FAILED
Endpoints = dict[str, bytes]


class Scene:
    """A victim into whose cache peers may push, and another engine of the same host and user."""

    def __init__(self, spawn: Spawner, backend: str = "auto", **more: str) -> None:
        self.victim, self.other = spawn(), spawn()
        self.at = [
            p.call(actors.up, number, actors.options("B", backend, "127.0.0.1:0", **more))
            for number, p in ((VICTIM, self.victim), (OTHER, self.other))
        ]
        self.victim.call(open_destination)

    def attack(self, client: Impostor, endpoints: Endpoints, owner: Peer) -> str:
        """Shows these to the victim, offers memory of ``owner``; the reasons in the victim's ``links()``."""
        secret = owner.call(keep_secret)
        reads_by = client.show(endpoints)
        client.publish(secret)
        answer = client.offer(secret)
        assert not self.victim.call(holds_secret)
        assert not isinstance(answer, Done) or answer.code != LLMStatusCode.LLM_SUCCESS
        assert not {"local", "shm", "nixl"} & set(reads_by), reads_by
        ((transport, reasons),) = self.victim.call(told)
        assert transport == "tcp"
        return str(reasons)


@pytest.fixture
def scene(spawn: Spawner) -> Scene:
    return Scene(spawn)


def _as_told(welcome: Welcome, client: Impostor, proven: Welcome) -> Endpoints:
    return dict(welcome.endpoints)


def _with_our_proof(welcome: Welcome, client: Impostor, proven: Welcome) -> Endpoints:
    """The place of the other, the proof of this connection."""
    proof = client.proof(proven)
    return {name: _altered(blob, proof) for name, blob in welcome.endpoints.items() if name != "tcp"}


def _altered(blob: bytes, proof: bytes) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(blob), "proof": proof})


@pytest.mark.parametrize("made", [_as_told, _with_our_proof])
@pytest.mark.rule("S.20")
def test_g16_the_victims_own_endpoint(
    scene: Scene, made: Callable[[Welcome, Impostor, Welcome], Endpoints]
) -> None:
    """What the client was told in its own handshake, which is still under way."""
    with impostor(scene.at[0]) as client:
        welcome = client.welcomed(VICTIM)
        reasons = scene.attack(client, made(welcome, client, welcome), scene.victim)
    assert "local: " in reasons and "connection" in reasons


@pytest.mark.parametrize("made", [_as_told, _with_our_proof])
@pytest.mark.rule("S.20")
def test_g16_an_endpoint_of_another_engine_of_the_host(
    scene: Scene, made: Callable[[Welcome, Impostor, Welcome], Endpoints]
) -> None:
    """The challenge is passed on: the other engine puts a proof for it where the victim will look."""
    with impostor(scene.at[0]) as client, impostor(scene.at[1]) as relay:
        welcome = client.welcomed(VICTIM)
        relayed = relay.welcomed(OTHER, welcome.challenge)
        reasons = scene.attack(client, made(relayed, client, welcome), scene.other)
    assert "local: " in reasons and "connection" in reasons


@pytest.mark.rule("S.20")
def test_g16_an_endpoint_that_was_good_in_an_earlier_handshake(scene: Scene) -> None:
    """An honest link of the two was there; a client says afterwards what it has heard of it."""
    code = scene.other.call(actors.link, [(VICTIM, scene.at[0])])
    assert code[0] == LLMStatusCode.LLM_SUCCESS
    scene.other.call(actors.unlink, [VICTIM])
    with impostor(scene.at[1]) as earlier:
        old = earlier.welcomed(OTHER)
    with impostor(scene.at[0]) as client:
        welcome = client.welcomed(VICTIM)
        reasons = scene.attack(client, _with_our_proof(old, client, welcome), scene.other)
    assert "the other end of this connection" in reasons


@pytest.mark.parametrize("whose", ["victim", "other"])
def test_g16_pools_of_another_process(spawn: Spawner, whose: str) -> None:
    """Transport shm: the owner gives its memory to nobody who shows a proof of another's connection."""
    scene = Scene(spawn, MemPoolConfig=pool(1 << 20))
    with impostor(scene.at[0]) as client, impostor(scene.at[1]) as relay:
        welcome = client.welcomed(VICTIM)
        shown = welcome if whose == "victim" else relay.welcomed(OTHER, welcome.challenge)
        secret = getattr(scene, whose).call(keep_secret)
        blob = _altered(shown.endpoints["shm"], client.proof(welcome))
        client.show({"shm": blob, "words": blob})
        client.publish(secret)
        client.offer(secret)
        assert not scene.victim.call(holds_secret)
        ((_, reasons),) = scene.victim.call(told)
    assert "shm: not in use: the peer refused" in reasons and "proof of a handshake" in reasons


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_g16_a_client_that_says_it_is_its_victim(spawn: Spawner, backend: str) -> None:
    scene = Scene(spawn, backend)
    with impostor(scene.at[0]) as first:
        me = first.welcomed(VICTIM).identity
    for cluster_id in (VICTIM, 9):
        with impostor(scene.at[0]) as client:
            refused = client.greet(VICTIM, cluster_id=cluster_id, instance=me.instance)
            assert isinstance(refused, Refused) and refused.code == FAILED
            assert "this very process" in refused.text
            assert client.hear() is None
    assert scene.victim.call(actors.links) == []
    assert scene.victim.call(actors.link, [(VICTIM, scene.at[0])])[0] == LLMStatusCode.LLM_SUCCESS


def test_g16_a_forced_transport_that_is_not_proven_is_no_link(spawn: Spawner) -> None:
    """The refusal comes when the peer has shown what it has."""
    scene = Scene(spawn, "local")
    with impostor(scene.at[0]) as client:
        welcome = client.welcomed(VICTIM)
        with pytest.raises(AssertionError, match="this very connection"):
            client.show(dict(welcome.endpoints))
    assert scene.victim.call(actors.links) == []


def test_g16_a_proxy_between_two_engines_of_a_host_means_tcp(spawn: Spawner) -> None:
    """Neither sees the other's end; it is said, and bytes go by tcp."""
    scene = Scene(spawn)
    with proxy(scene.at[0]) as address:
        assert scene.other.call(actors.link, [(VICTIM, address)])[0] == LLMStatusCode.LLM_SUCCESS
        for peer in (scene.other, scene.victim):
            ((transport, reasons),) = peer.call(told)
            assert transport == "tcp" and "local: " in reasons and "a proxy" in reasons
        scene.other.call(actors.unlink, [VICTIM])


# ---- what an offer may read ------------------------------------------------------------------------------


@pytest.fixture
def honest(scene: Scene) -> Iterator[Impostor]:
    """A peer made of a bare socket that shows its own memory, as it should."""
    with closing(Loop()) as loop, closing(transport(Movers(0), loop)) as local, impostor(scene.at[0]) as peer:
        proof = peer.proof(peer.welcomed(VICTIM))
        assert peer.show({"local": local.endpoint(proof)}) == ("local",)
        local.hide(proof)
        yield peer


def test_g16_an_honest_peer_is_read(scene: Scene, honest: Impostor) -> None:
    """What the attacks lack."""
    mine = ctypes.create_string_buffer(SECRET, 1024)
    honest.publish(ctypes.addressof(mine))
    answer = honest.offer(ctypes.addressof(mine), time_left_ms=10_000)
    assert isinstance(answer, Done) and answer.code == LLMStatusCode.LLM_SUCCESS
    assert scene.victim.call(holds_secret)


@pytest.mark.parametrize("withdrawn", [False, True])
@pytest.mark.rule("S.20", "S.22")
def test_g16_an_offer_reads_nothing_that_was_not_published(
    scene: Scene, honest: Impostor, withdrawn: bool
) -> None:
    mine = ctypes.create_string_buffer(SECRET, 1024)
    if withdrawn:
        honest.publish(ctypes.addressof(mine))
        honest.say(Withdraw(cache_ids=(7,)))
    assert honest.offer(ctypes.addressof(mine)) is None, "the link ends"
    assert not scene.victim.call(holds_secret)
    assert scene.victim.call(has_no_link)
    with impostor(scene.at[0]) as again:
        again.show({name: b"" for name in again.welcomed(VICTIM).endpoints if name == "tcp"})
        again.publish(ctypes.addressof(mine))
        answer = again.offer(ctypes.addressof(mine), source_id=8)
        assert answer is None, "what was published on another link, or as another cache, is not here"


def test_g16_who_says_that_it_is_an_engine_of_this_process_learns_nothing_of_it() -> None:
    """Whether a source and a destination overlap is looked up with that engine if it has the other end of the link."""
    with Engines("B", "tcp", timeout_ms=300) as engines:
        victim, other = engines.make(VICTIM), engines.make(OTHER)
        _, memory = engines.blocks(victim, model_id=5)
        shared = engines.register(other, memory)
        assert other._engine is not None and victim.listen_address is not None
        with impostor(victim.listen_address) as client:
            assert isinstance(client.greet(VICTIM, instance=other._engine._instance), Welcome)
            client.show({})
            client.publish(0, cache_id=shared.cache_id, tensors=4, stride=64)
            answer = client.offer(0, shared.cache_id, tensors=4)
        assert isinstance(answer, Done) and answer.code != LLMStatusCode.LLM_SUCCESS
        assert "overlaps" not in answer.text
