"""Transport ``local``: who can be reached and why not, and what it leaves behind."""

from __future__ import annotations

import base64
import errno
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist._core.limits import PROOFS
from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import extents
from llm_datadist.transports import _libc
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import FaultKind, Progress, TransportUnavailable
from tests.support import local_pair
from tests.support.local_pair import PROOF, LocalOwner, Loop, endpoint, nothing, transport
from tests.support.other_user import needs_root
from tests.support.raw_owner import SALT, local_name
from tests.support.shortage import descriptors_left

LATER = float("inf")


@pytest.fixture
def reader() -> Iterator[LocalTransport]:
    with closing(transport(Movers(0))) as reader:
        yield reader


@pytest.fixture(scope="module")
def owner() -> Iterator[LocalOwner]:
    with closing(LocalOwner()) as owner:
        yield owner


def reason(reader: LocalTransport, blob: bytes) -> str:
    with pytest.raises(TransportUnavailable) as caught:
        reader.open(endpoint(blob), deadline=0)
    return str(caught.value)


def elsewhere(rest: bytes) -> dict[str, Any]:
    """The endpoint of a process that is not there."""
    return {"name": local_name() + rest, "salt": SALT, "page": 4096}


def altered(blob: bytes, **changes: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(blob), **changes})


def one_word(source: int, destination: np.ndarray[Any, np.dtype[np.uint64]]) -> Segments:
    return Segments(extents([source], [(0, 8)]), extents([int(destination.ctypes.data)], [(0, 8)]))


def test_a_process_reads_itself(reader: LocalTransport) -> None:
    """A self link: own pid, own listener, nobody accepts meanwhile."""
    word, seen = np.array([0x0123456789ABCDEF], dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    channel = reader.open(endpoint(reader.endpoint(PROOF)), deadline=0)
    progress = channel.read(one_word(int(word.ctypes.data), seen)).wait(deadline=LATER)
    assert progress == Progress(8) and seen[0] == word[0]


def test_blob_is_small_and_its_secrets_differ(reader: LocalTransport) -> None:
    with closing(transport(Movers(0))) as other:
        one, two = (msgspec.msgpack.decode(t.endpoint(PROOF)) for t in (reader, other))
    assert len(reader.endpoint(PROOF)) < 200
    assert one["salt"] != two["salt"] and one["name"] != two["name"]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"x",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode({"name": 1}),
        b"\x91" * 100_000,
        secrets.token_bytes(64),
    ],
    ids=["empty", "text", "array", "wrong type", "nested", "random"],
)
def test_z3_malformed_endpoint(reader: LocalTransport, blob: bytes) -> None:
    assert "not valid" in reason(reader, blob)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": b"/tmp/somebody"}, "not valid: name"),
        ({"name": b"\0llm-datadist/nobody"}, "not valid: name"),
        (elsewhere(b"y" * 200), "cannot be met"),
        (elsewhere(b"nobody"), "another host or another network namespace"),
        ({"page": 0x1000}, "not valid: name, page"),
        ({"page": -1}, "not valid: name, page"),
        ({"page": 1 << 64 - 1}, "not valid: name, page"),
        ({"slot": -1}, "not valid: name, page, slot"),
        ({"slot": PROOFS}, "not valid: name, page, slot"),
        ({"slot": 1}, "is not, or no longer, the other end"),
        ({"salt": bytes(16)}, "not valid: name"),
        ({"salt": b""}, "not valid: name"),
        ({"proof": b""}, "slot or proof"),
        ({"proof": bytes(32)}, "this very connection"),
    ],
)
def test_endpoint_of_somebody_else(
    reader: LocalTransport, owner: LocalOwner, changes: dict[str, Any], text: str
) -> None:
    assert text in reason(reader, altered(owner.endpoint.blob, **changes))


def test_g16_a_proof_is_there_for_one_handshake(reader: LocalTransport) -> None:
    with closing(transport(Movers(0))) as owner:
        blob, other = owner.endpoint(PROOF), owner.endpoint(PROOF[::-1])
        assert "this very connection" in reason(reader, other), "it is another's"
        reader.open(endpoint(blob), deadline=0).close()
        owner.hide(PROOF)
        assert "the other end of this connection" in reason(reader, blob), "it was used once"
        owner.hide(PROOF)
        reader.open(endpoint(owner.endpoint(PROOF)), deadline=0).close()


@pytest.mark.rule("S.20")
def test_g16_the_right_bytes_elsewhere_are_no_proof(reader: LocalTransport) -> None:
    """What a peer can have written into a cache of another process: the place must be that process's choice."""
    planted = np.frombuffer(PROOF, np.uint8).copy()
    with closing(transport(Movers(0))) as victim:
        blob = victim.endpoint(PROOF[::-1])
        assert "not valid" in reason(
            reader, altered(blob, proof=PROOF, page=int(planted.ctypes.data), slot=0)
        )
        away = (int(planted.ctypes.data) - msgspec.msgpack.decode(blob)["page"]) // 32
        assert "not valid" in reason(reader, altered(blob, proof=PROOF, slot=away))


def test_g16_more_handshakes_than_slots(reader: LocalTransport) -> None:
    proofs = [at.to_bytes(32, "little") for at in range(PROOFS)]
    for proof in proofs:
        reader.endpoint(proof)
    with pytest.raises(TransportUnavailable, match="which is the most"):
        reader.endpoint(PROOF)
    reader.hide(proofs[7])
    reader.endpoint(PROOF)


@pytest.mark.rule("S.10", "S.18")
@needs_root
def test_p2_other_user(owner: LocalOwner) -> None:
    """The reader runs as nobody: the reason names both users and the way out."""
    text = _reason_elsewhere(owner, "from tests.support.other_user import become; become()")
    for part in (f"process {owner.pid} runs with user id 0", "this one with 65534", "as one user"):
        assert part in text


@pytest.mark.rule("S.44")
@needs_root
def test_g16_root_reads_no_other_user(reader: LocalTransport) -> None:
    """Who need not show anything to be read could leave the read unanswered, on the control thread."""
    with closing(LocalOwner([sys.executable, local_pair.__file__, "nobody"])) as owner:
        text = reason(reader, owner.endpoint.blob)
    assert "runs with user id 65534, this one with 0" in text


@needs_root
def test_p2_no_right_to_trace(owner: LocalOwner) -> None:
    """The reader has the same user id, and none of root's rights: every way out is named."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare")
    text = _reason_elsewhere(owner, "", [unshare, "--user", "--map-root-user"])
    for part in ("process_vm_readv", str(owner.pid), "ptrace", "Yama", "llm.AllowPtrace", "seccomp"):
        assert part in text


def test_other_pid_namespace(owner: LocalOwner) -> None:
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("needs root and unshare")
    assert "another pid namespace" in _reason_elsewhere(owner, "", [unshare, "--pid", "--fork"])


def test_other_network_namespace(owner: LocalOwner) -> None:
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("needs root and unshare")
    assert "another network namespace" in _reason_elsewhere(owner, "", [unshare, "--net"])


def _reason_elsewhere(owner: LocalOwner, first: str, prefix: list[str] | None = None) -> str:
    program = f"""
import base64, sys
from tests.support.local_pair import endpoint, transport
from llm_datadist._core.limits import PROOFS
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import TransportUnavailable
reader = transport(Movers(0))
{first}
try:
    reader.open(endpoint(base64.b64decode(sys.argv[1])), deadline=0)
except TransportUnavailable as exc:
    print(exc)
"""
    blob = base64.b64encode(owner.endpoint.blob).decode()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [*(prefix or []), sys.executable, "-c", program, blob],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ENOSYS, "seccomp"), (errno.EPERM, "llm.AllowPtrace"), (errno.ENOMEM, "memory")],
)
def test_reasons_of_the_kernel(
    reader: LocalTransport, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    monkeypatch.setattr(_libc, "read_one", lambda *_: -number)
    found = reason(reader, reader.endpoint(PROOF))
    assert text in found and os.strerror(number) in found and str(os.getpid()) in found


def test_kernel_without_pidfd(reader: LocalTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert "pidfd_open" in reason(reader, reader.endpoint(PROOF))


def test_process_that_ends_during_the_proof(reader: LocalTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number could be another's by now, whatever memory says."""
    with closing(LocalOwner()) as owner:
        real = _libc.read_one

        def read_then_kill(*args: int) -> int:
            done = real(*args)
            owner.kill()
            return done

        monkeypatch.setattr(_libc, "read_one", read_then_kill)
        assert "no longer" in reason(reader, owner.endpoint.blob)


def test_full_queue_hangs_nobody(reader: LocalTransport) -> None:
    name = local_name() + secrets.token_bytes(4).hex().encode()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(name)
        listener.listen(0)
        first.connect(name)
        assert "queue" in reason(
            reader, altered(reader.endpoint(PROOF), **elsewhere(name.removeprefix(local_name())))
        )


def test_r1_more_opens_than_the_queue_holds() -> None:
    """The owner takes every connection out of its queue, and keeps none."""
    loop = Loop()
    with closing(transport(Movers(0), loop)) as owner, closing(transport(Movers(0))) as reader:
        for _ in range(socket.SOMAXCONN + 200):
            reader.open(endpoint(owner.endpoint(PROOF)), deadline=0).close()
    loop.close()


def test_g14_a_listener_without_descriptors_rests_and_loses_nobody() -> None:
    callbacks: list[Callable[[], float]] = []
    owner = LocalTransport(
        Movers(0), lambda _, call: callbacks.append(call), nothing, False, secrets.token_bytes
    )
    name = msgspec.msgpack.decode(owner.endpoint(PROOF))["name"]
    with closing(owner), socket.socket(socket.AF_UNIX) as client:
        client.connect(name)
        client.settimeout(5.0)
        with descriptors_left(0):
            assert callbacks[0]() > 0, "left in the queue it would wake us for ever"
        assert not callbacks[0]()
        assert client.recv(1) == b""


def test_listener_that_cannot_be_adopted_leaves_nothing() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no loop")

    with pytest.raises(RuntimeError, match="no loop"):
        LocalTransport(Movers(0), refuse, nothing, False, secrets.token_bytes)


@pytest.mark.rule("3.65")
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.rule("S.11")
def test_tracers_are_allowed_only_when_asked(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(_libc, "allow_any_tracer", lambda: calls.append("allowed"))
    transport(Movers(0), allow_ptrace=allowed).close()
    assert calls == ["allowed"] * allowed


def test_asking_for_tracers_is_harmless_without_yama() -> None:
    transport(Movers(0), allow_ptrace=True).close()


def test_closing_the_transport_closes_its_channels(owner: LocalOwner) -> None:
    reader = transport(Movers(0))
    channel = reader.open(owner.endpoint, deadline=0)
    reader.close()
    reader.close()
    progress = channel.read(one_word(1, np.zeros(1, dtype=np.uint64))).wait(deadline=LATER)
    assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED
    assert "closed" in reason(reader, owner.endpoint.blob)


def test_f1_forked_child_cannot_pass_for_its_parent(reader: LocalTransport) -> None:
    """It inherits the listener and the addresses, but not the proofs."""
    told = msgspec.msgpack.decode(reader.endpoint(PROOF))
    address = told["page"] + told["slot"] * len(PROOF)
    ready_r, ready_w = os.pipe()
    done_r, done_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready_w, b"x")
        os.read(done_r, 1)
        os._exit(0)
    os.read(ready_r, 1)
    seen = np.full(32, 7, dtype=np.uint8)
    done = _libc.read_one(pid, int(seen.ctypes.data), address, 32)
    os.write(done_w, b"x")
    os.waitpid(pid, 0)
    for fd in (ready_r, ready_w, done_r, done_w):
        os.close(fd)
    assert done == 32 and not seen.any()
