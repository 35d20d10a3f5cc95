"""Reasons not to use a transport that a handshake finds: real processes, and peers that offer what they are told."""

from __future__ import annotations

import errno
import socket
from typing import Any

import numpy as np

from llm_datadist import FeatureNotEnabledError, LLMStatusCode
from llm_datadist._link.seam import Address
from llm_datadist.transports.seam import NOT_THIS_CONNECTION
from tests.support import actors, allocated, netns, other_user
from tests.support.engines import Engines
from tests.support.pair import D_ID, P_ID, SUCCESS
from tests.support.peers import Peer
from tests.support.raw_owner import (
    LOCAL_NAME,
    SHM_NAME,
    Endpoint,
    local_endpoint,
    local_name,
    raw_owner,
    shm_endpoint,
    unix_listener,
)
from tests.support.reasons import Force, Stage, forces
from tests.support.seccomp import peer_without
from tests.support.world import World

FAILED = LLMStatusCode.LLM_LINK_FAILED
POOL = {"MemPoolConfig": allocated.pool(1 << 20)}
ADD_SEALS = 1033


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
    "process {} runs with user id {}, this one with {}: transport local reads only processes of the same user, also "
    "as root; run both as one user"
)
def another_user(stage: Stage) -> str:
    d = stage.spawn(env={"HOME": None})
    d.call(other_user.become_in)
    told = goes_by("tcp", linked(stage.spawn(), d))
    assert "user id 0" in told and "65534" in told
    return told


@forces(
    "user id {} stands for every user that this user namespace does not know, so nobody is sure to be the same one; "
    "run the engine as a user id of its own"
)
@forces(
    "{}; this process runs with user id {}, the other with {}. Reading needs the right to ptrace it: the same user "
    "ids (or CAP_SYS_PTRACE) and a dumpable process. Under Yama ({}) the owner must set llm.AllowPtrace to 1; a "
    "container's seccomp profile may forbid it as well"
)
def other_user_namespace(stage: Stage) -> str:
    """There this user is nobody, as all others are, and has no right over processes outside."""
    netns.need_namespaces()
    d = stage.spawn(prefix=("unshare", "--user", "--map-user=65534"))
    return goes_by("tcp", linked(stage.spawn(), d))


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
    return told


@forces("the peer shares no memory: it has no pool, or its system does not let it")
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


def offered(endpoints: dict[str, Endpoint], backend: str = "auto", mine: str = "auto") -> str:
    with raw_owner(endpoints, backend=backend) as address, Engines("B", mine) as engines:
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
forces(_LOCAL + "name, page, slot or proof")(wrong("local", local_endpoint(b"elsewhere")))
forces(_LOCAL + "name, page, slot or proof")(wrong("local", local_endpoint(page=8192)))
forces(_LOCAL + "name, page, slot or proof")(wrong("local", local_endpoint(proof=b"short")))
forces(_SHM + "{}")(wrong("shm", b"\xc1"))
forces(_SHM + "name or proof")(wrong("shm", shm_endpoint(LOCAL_NAME)))
forces(_SHM + "name or proof")(wrong("shm", shm_endpoint(proof=b"short")))
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
    with unix_listener(local_name(), full=True) as name:
        return offered({"local": lambda proof: local_endpoint(name, proof=proof), "tcp": b""})


@forces("process {} is not, or no longer, the other end of this connection")
def another_process(stage: Stage) -> str:
    page = np.zeros(32, np.uint8).ctypes.data
    with unix_listener(local_name(page)) as name:
        return offered({"local": lambda proof: local_endpoint(name, page, proof), "tcp": b""})


@forces(NOT_THIS_CONNECTION)
def another_connection(stage: Stage) -> str:
    told = offered({"local": local_endpoint(), "shm": shm_endpoint(), "tcp": b""})
    assert told.count("this very connection") == 2
    return told


# ---- simulated: what happens within microseconds of a finalize ---------------------------------------------------


def _closed(name: str, blob: Endpoint) -> str:
    with raw_owner({name: blob}) as address, Engines("B", name) as engines:
        me = engines.make(2)
        assert me._engine is not None
        me._engine._transports.opened[name].close()
        return told_of(engines, me, address)


@forces("transport local of this process is closed")
def closed_local(stage: Stage) -> str:
    memory = np.zeros(32, np.uint8)
    page = memory.ctypes.data

    def show(proof: bytes) -> bytes:
        memory[:] = np.frombuffer(proof, np.uint8)
        return local_endpoint(name, page, proof)

    with unix_listener(local_name(page)) as name:
        return _closed("local", show)


@forces("transport shm of this process is closed")
def closed_shm(stage: Stage) -> str:
    with unix_listener(SHM_NAME, kind=socket.SOCK_SEQPACKET) as name:
        return _closed("shm", lambda proof: shm_endpoint(name, proof))


@forces("transport tcp of this process is closed")
def closed_tcp(stage: Stage) -> str:
    return _closed("tcp", b"")
