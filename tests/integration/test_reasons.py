"""Every reason that can be given for not using a transport is forced, and read where users read it.

``FORCED`` has one entry for each text in the source. A text with no entry fails the last test.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, FeatureNotEnabledError, LLMException, LLMStatusCode
from llm_datadist._link.seam import Address
from llm_datadist.devices.shared_memory import create_memfd, seal
from llm_datadist.transports import shm_memory, shm_owner
from tests.support import actors, allocated, netns, reasons
from tests.support.engines import Engines
from tests.support.pair import D_ID, P_ID, SUCCESS
from tests.support.peers import Peer
from tests.support.pool import Spawner
from tests.support.raw_owner import (
    LOCAL_NAME,
    local_endpoint,
    raw_owner,
    shm_endpoint,
    unix_listener,
)
from tests.support.seccomp import peer_without
from tests.support.world import World

FAILED = LLMStatusCode.LLM_LINK_FAILED
MIB = 1 << 20
POOL = {"MemPoolConfig": allocated.pool(MIB)}
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
ADD_SEALS = 1033


@dataclass
class Stage:
    """What the entries need."""

    spawn: Spawner
    patch: pytest.MonkeyPatch


Force = Callable[[Stage], str]
FORCED: dict[str, tuple[Force, ...]] = {}


def forces(template: str) -> Callable[[Force], Force]:
    """Decorates what makes a text appear and returns all that users are told."""

    def keep(force: Force) -> Force:
        FORCED[template] = (*FORCED.get(template, ()), force)
        return force

    return keep


# ---- two processes --------------------------------------------------------------------------------------------


def _told(w: World) -> tuple[str, str]:
    """Transport and reasons of the only link; "" and the error of the last attempt where there is none."""
    for info in w.dist.links():
        return info.transport, "\n".join(info.reasons)
    return "", str(w.dist.link_error(P_ID))


def linked(p: Peer, d: Peer, listen: str = "127.0.0.1", **more: str) -> tuple[str, str]:
    """Links D to P, which has a pool, both with transport "auto"; what D is told."""
    _, port = p.call(actors.up, P_ID, actors.options("B", "auto", f"{listen}:0", **{**POOL, **more}))
    d.call(actors.up, D_ID, actors.options("B", "auto"))
    codes = d.call(actors.link, [(P_ID, (listen, port))])
    assert codes == (SUCCESS, [SUCCESS])
    told: tuple[str, str] = d.call(_told)
    return told


def goes_by(transport: str, told: tuple[str, str]) -> str:
    """The reasons, if that is what was taken instead."""
    assert told[0] == transport, told
    return told[1]


@forces(
    "its memory belongs to user id {}, the reader runs as {}; pools are shared within one user, and with root"
)
@forces(
    "{}; this process runs with user id {}, the other with {}. Reading needs the right to ptrace it: the same user "
    "ids (or CAP_SYS_PTRACE) and a dumpable process. Under Yama ({}) the owner must set llm.AllowPtrace to 1; a "
    "container's seccomp profile may forbid it as well"
)
def another_user(stage: Stage) -> str:
    told = goes_by("tcp", linked(stage.spawn(), stage.spawn(prefix=NOBODY, env={"HOME": None})))
    assert "user id 0" in told and "65534" in told
    return told


@forces("process_vm_readv from process {} failed: {}")
def no_right(stage: Stage) -> str:
    return goes_by("shm+tcp", linked(stage.spawn(), peer_without(stage.spawn, "process_vm_readv", errno.EIO)))


@forces("{}; this kernel does not offer it, or a seccomp profile hides it")
def no_call(stage: Stage) -> str:
    without = peer_without(stage.spawn, "process_vm_readv", errno.ENOSYS)
    return goes_by("shm+tcp", linked(stage.spawn(), without))


@forces("process {} cannot be watched with pidfd_open: {}")
def no_pidfd(stage: Stage) -> str:
    without = peer_without(stage.spawn, "pidfd_open", errno.ENOSYS)
    return goes_by("shm+tcp", linked(stage.spawn(), without))


@forces("the peer is in another pid namespace (SO_PEERCRED gives 0): its memory cannot be addressed")
def other_pids(stage: Stage) -> str:
    netns.need_namespaces()
    apart = stage.spawn(prefix=("unshare", "--pid", "--fork", "--kill-child"))
    return goes_by("shm+tcp", linked(stage.spawn(), apart))


@forces("the peer cannot be met on this host ({}): another host or another network namespace")
def other_network(stage: Stage) -> str:
    with netns.joined(slow=False) as (a, b):
        p, d = stage.spawn(prefix=a.prefix), stage.spawn(prefix=b.prefix)
        told = goes_by("tcp", linked(p, d, a.address))
        assert told.count("cannot be met") == 2, "neither shm nor local can be there"
        for peer in (p, d):
            peer.call(actors.reset)
            peer.close()
    return told


@forces("the peer has no pool to share")
def no_pool(stage: Stage) -> str:
    p, d = stage.spawn(), stage.spawn()
    address = p.call(actors.up, P_ID, actors.options("B", "auto", "127.0.0.1:0"))
    d.call(actors.up, D_ID, actors.options("B", "auto"))
    d.call(actors.link, [(P_ID, address)])
    return goes_by("local", d.call(_told))


@forces("this system gives no memory that can be shared: {}")
def no_memfd(stage: Stage) -> str:
    d = peer_without(stage.spawn, "memfd_create", errno.EPERM)
    forced = d.attempt(actors.up, D_ID, {**actors.options("B", "shm"), "llm.HostMemPoolConfig": ""})
    assert forced.code != SUCCESS
    return goes_by("local", linked(stage.spawn(), d))


@forces("the kernel cannot seal memory for readers ({}); that needs Linux 5.1")
def no_seals(stage: Stage) -> str:
    d = peer_without(stage.spawn, "fcntl", errno.EINVAL, ADD_SEALS)
    forced = d.attempt(actors.up, D_ID, actors.options("B", "shm")).raised(FeatureNotEnabledError)
    told = goes_by("local", linked(stage.spawn(), d))
    assert "cannot seal" in forced.text and "'auto'" in forced.text
    return told


@forces("transfer_backend is {} here and {} at the peer")
def two_wishes(stage: Stage) -> str:
    p, d = stage.spawn(), stage.spawn()
    address = p.call(actors.up, P_ID, actors.options("B", "tcp", "127.0.0.1:0"))
    d.call(actors.up, D_ID, actors.options("B", "local"))
    assert d.call(actors.link, [(P_ID, address)]) == (FAILED, [FAILED])
    return goes_by("", d.call(_told))


# ---- a peer that says what it is told ----------------------------------------------------------------------------


def told_of(engines: Engines, me: Any, address: Address, cluster_id: int = 9) -> str:
    """Links to a raw owner and says what ``me`` is told about it."""
    me.link_clusters([actors.cluster(cluster_id, (address.host, address.port))], 3000)
    for info in me.links():
        if info.cluster_id == cluster_id:
            return "\n".join(info.reasons)
    return str(me.link_error(cluster_id))


def offered(endpoints: dict[str, bytes], backend: str = "auto", mine: str = "auto") -> str:
    with Engines("B", mine) as engines, raw_owner(endpoints, backend=backend) as address:
        return told_of(engines, engines.make(2), address)


def wrong(name: str, blob: bytes) -> Force:
    """A peer with an endpoint that is no good: the next transport is taken, or the link fails if it was forced."""

    def force(stage: Stage) -> str:
        told = offered({name: blob, "tcp": b""})
        assert "tcp: chosen" in told
        alone = offered({name: blob, "tcp": b""}, mine=name)
        assert "no transport reads cluster 9" in alone and "is not valid" in alone
        return told

    return force


_LOCAL, _SHM = (f"the peer's endpoint of transport {name} is not valid: " for name in ("local", "shm"))
forces(_LOCAL + "{}")(wrong("local", b"\xc1"))
forces(_LOCAL + "name or nonce")(wrong("local", local_endpoint(b"elsewhere")))
forces(_LOCAL + "name or nonce")(wrong("local", local_endpoint(nonce=b"short")))
forces(_SHM + "{}")(wrong("shm", b"\xc1"))
forces(_SHM + "name or secret")(wrong("shm", shm_endpoint(LOCAL_NAME)))
forces(_SHM + "name or secret")(wrong("shm", shm_endpoint(secret=b"short")))
_AREAS = [((4096, 8192), (8192, 4096)), ((4096, 0),), ((2**64 - 4096, 4096),)]
for _areas in _AREAS:
    forces(_SHM + "areas overlap, or are beyond 2**64")(wrong("shm", shm_endpoint(areas=_areas)))
for _areas in ((), tuple((4096 * (2 * i + 1), 4096) for i in range(17))):
    forces(_SHM + "{} areas, 1 to {} can be")(wrong("shm", shm_endpoint(areas=_areas)))


@forces("the peer does not offer it")
def not_offered(stage: Stage) -> str:
    return offered({"tcp": b""})


@forces("transfer_backend {} finds no transport here")
def unknown_wish(stage: Stage) -> str:
    return offered({"tcp": b""}, backend="teleport")


@forces("the peer's queue of local connections is full; try again")
def full_queue(stage: Stage) -> str:
    with unix_listener(LOCAL_NAME, full=True) as name:
        return offered({"local": local_endpoint(name), "tcp": b""})


@forces("process {} is not, or no longer, the one of the handshake")
def another_process(stage: Stage) -> str:
    memory = np.zeros(16, np.uint8)
    with unix_listener(LOCAL_NAME) as name:
        return offered({"local": local_endpoint(name, memory.ctypes.data), "tcp": b""})


@forces("tcp: the link to cluster {} is open already")
def token_used_twice(stage: Stage) -> str:
    token = os.urandom(16)
    with Engines("B", "tcp") as engines, contextlib.ExitStack() as stack:
        me = engines.make(2)
        first, second = (stack.enter_context(raw_owner({"tcp": b""}, n, token=token)) for n in (8, 9))
        assert "tcp: chosen" in told_of(engines, me, first, 8)
        return told_of(engines, me, second)


# ---- simulated: what happens within microseconds of a finalize ---------------------------------------------------


def _closed(name: str) -> Force:
    def force(stage: Stage) -> str:
        with Engines("B", name) as engines:
            me, peer = engines.make(2), engines.make(1)
            me._engine._state  # noqa: B018
            assert me._engine is not None
            me._engine._transports.opened[name].close()
            assert engines.link(me, 1, peer) == FAILED
            return str(me.link_error(1))

    return force


forces("transport local of this process is closed")(_closed("local"))
forces("transport shm of this process is closed")(_closed("shm"))
forces("tcp: the transport is closed")(_closed("tcp"))


# ---- simulated: an owner whose answer is no good, which a reader learns after the handshake ----------------------


def _pull_fails(prepare: Callable[[Any], object], then: Callable[[], object] = lambda: None) -> str:
    """Two engines with transport "shm": what a pull is told after ``prepare`` was done to the owner."""
    with Engines("B", "shm") as engines:
        owner, reader = engines.make(1), engines.make(2)
        prepare(owner._engine._transports.opened["shm"]._giver)  # type: ignore[union-attr]
        linked = engines.link(reader, 1, owner)
        if linked != SUCCESS:
            return str(reader.link_error(1))
        engines.blocks(owner, 1, model_id=0)
        cache, memory = engines.blocks(reader)
        with pytest.raises(LLMException) as caught:
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
        assert caught.value.status_code == FAILED
        assert (memory == 0xA5).all()
        return str(caught.value)


def _replace(giver: Any, make: Callable[[int], int]) -> None:
    """Other descriptors in the place of the first."""
    fd = make(giver._descriptors[0])
    giver._descriptors = [fd, *giver._descriptors[1:]]


@forces("the peer refused: {}")
@forces("the secret that this process shows is not the owner's: its endpoint is out of date")
def old_secret(stage: Stage) -> str:
    return _pull_fails(lambda giver: setattr(giver, "_secret", b"x" * 16))


@forces("the owner of the memory has {} readers, which is the most")
def too_many(stage: Stage) -> str:
    stage.patch.setattr(shm_owner, "MAX_READERS", 0)
    return _pull_fails(lambda giver: None)


@forces(
    "its memory belongs to user id {}, the reader runs as {}; pools are shared within one user, and with root"
)
def refused_by_the_owner(stage: Stage) -> str:
    """A reader that asks although it would be refused."""
    whose = shm_owner.whose_refusal
    stage.patch.setattr(shm_owner, "whose_refusal", lambda owner, _: whose(owner, 65534))
    return _pull_fails(lambda giver: None)


@forces("the owner of the memory cannot pass it on: {}")
def cannot_pass(stage: Stage) -> str:
    def fail(*_: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    stage.patch.setattr(shm_owner.socket, "send_fds", fail)
    return _pull_fails(lambda giver: None)


@forces("the peer closed the connection without an answer")
def no_answer(stage: Stage) -> str:
    stage.patch.setattr(shm_owner.Giver, "welcome", lambda _, sock: sock.close())
    return _pull_fails(lambda giver: None)


@forces("the peer has not sent its memory yet: it is stopped, or too busy to answer")
def late_answer(stage: Stage) -> str:
    held: list[Any] = []
    stage.patch.setattr(shm_owner.Giver, "welcome", lambda _, sock: held.append(sock))
    try:
        return _pull_fails(lambda giver: None)
    finally:
        for sock in held:
            sock.close()


@forces("the connection to the peer's memory broke: {}")
def broken(stage: Stage) -> str:
    def fail(_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stage.patch.setattr(shm_memory.PeerMemory, "_take_message", fail)
    return _pull_fails(lambda giver: None)


@forces("the peer sent {} areas of {}; is this process out of descriptors?")
def too_few(stage: Stage) -> str:
    return _pull_fails(lambda giver: setattr(giver, "_descriptors", giver._descriptors[:-1]))


@forces("the peer's memory cannot be mapped: {}")
def no_room(stage: Stage) -> str:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    stage.patch.setattr(shm_memory, "map_memory", fail)
    return _pull_fails(lambda giver: None)


def _memfd(nbytes: int, *, sealed: bool) -> Iterator[int]:
    fd = create_memfd("test", nbytes)
    if sealed:
        assert not seal(fd)
    yield fd
    os.close(fd)


_memory = contextlib.contextmanager(_memfd)


@forces("the peer sent memory that it could still shrink or write through another mapping; refused")
def not_sealed(stage: Stage) -> str:
    with _memory(1 << 30, sealed=False) as fd:
        return _pull_fails(lambda giver: _replace(giver, lambda _: fd))


@forces("the peer sent {} bytes of memory and announced {}; refused")
def smaller(stage: Stage) -> str:
    with _memory(4096, sealed=True) as fd:
        return _pull_fails(lambda giver: _replace(giver, lambda _: fd))


# ---- the tests -------------------------------------------------------------------------------------------------

CASES = [
    pytest.param(template, force, id=f"{getattr(force, '__name__', 'force')}-{at}")
    for at, (template, force) in enumerate((t, f) for t, forced in FORCED.items() for f in forced)
]


@pytest.mark.rule("4.34", "4.96")
@pytest.mark.parametrize(("template", "force"), CASES)
def test_p2_every_reason_is_told(
    template: str, force: Force, spawn: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = force(Stage(spawn, monkeypatch))
    assert reasons.pattern(template).search(told), told


def test_every_text_in_the_source_is_forced() -> None:
    assert reasons.templates() == set(FORCED)
    assert reasons.passed_on() == reasons.PASSED_ON, "texts from elsewhere: add where they are made to MAKERS"
