"""Transport ``shm``: who is given the memory and who not, what is refused, and what it leaves behind."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_datadist._core import limits
from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import extents, soon
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import shm_memory, shm_owner
from llm_datadist.transports.seam import Fault, FaultKind, Progress, TransportUnavailable
from llm_datadist.transports.shm import ShmChannel, ShmTransport
from tests.support.local_pair import PROOF, Loop
from tests.support.shm_pair import MIB, Shared, ShmOwner, endpoint, settle, transport
from tests.support.world import wait_until

WAIT_S = 10
UNSHARE = shutil.which("unshare")
needs_root = pytest.mark.skipif(os.geteuid() != 0 or UNSHARE is None, reason="needs root and unshare")
NOBODY = "from tests.support.other_user import become; become()"


@pytest.fixture
def area() -> Iterator[Shared]:
    with closing(Shared(MIB)) as area:
        yield area


@pytest.fixture
def loop() -> Iterator[Loop]:
    with closing(Loop()) as loop:
        yield loop


@pytest.fixture
def reader(area: Shared) -> Iterator[ShmTransport]:
    """Nobody accepts what it listens for."""
    with closing(transport([area.area])) as reader:
        yield reader


@pytest.fixture
def owner() -> Iterator[ShmOwner]:
    with closing(ShmOwner()) as owner:
        yield owner


def reason(reader: ShmTransport, blob: bytes) -> str:
    with pytest.raises(TransportUnavailable) as caught:
        reader.open(endpoint(blob), deadline=0)
    return str(caught.value)


def altered(blob: bytes, **changes: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(blob), **changes})


def opened(reader: ShmTransport, blob: bytes) -> ShmChannel:
    channel = reader.open(endpoint(blob), deadline=0)
    settle(channel)
    return channel


def refused(reader: ShmTransport, blob: bytes) -> str:
    """Why, whether the answer comes at once or later."""
    try:
        return opened(reader, blob).refusal
    except TransportUnavailable as exc:
        return str(exc)


def word(channel: ShmChannel, address: int) -> int | Fault:
    return channel.read_word(address, deadline=soon())


# ---- meeting ----------------------------------------------------------------------------------------------


def test_a_process_maps_itself(area: Shared, loop: Loop) -> None:
    """A self link: what is copied is copied within the process."""
    area.view(0, 8)[:] = range(8)
    with closing(transport([area.area], loop=loop)) as both:
        channel = opened(both, both.endpoint(PROOF))
        start = area.area.address
        assert channel.covers(extents([start], [(0, MIB)])) and not channel.refusal
        assert word(channel, start) == int.from_bytes(bytes(range(8)), "little")
        plan = Segments(extents([start], [(0, 8)]), extents([start], [(100, 8)]))
        assert channel.read(plan).wait(deadline=soon()) == Progress(8)
    assert area.view(100, 8).tolist() == list(range(8))


def test_blob_is_small_and_names_differ(area: Shared, reader: ShmTransport) -> None:
    with closing(transport([area.area])) as other:
        one, two = (msgspec.msgpack.decode(t.endpoint(PROOF)) for t in (reader, other))
    assert len(reader.endpoint(PROOF)) < 200
    assert one["name"] != two["name"]
    assert one["areas"] == [[area.area.address, MIB]]


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
def test_z3_malformed_endpoint(reader: ShmTransport, blob: bytes) -> None:
    assert "not valid" in reason(reader, blob)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": b"/tmp/somebody"}, "not valid: name or proof"),
        ({"name": b"\0llm-datadist-shm/" + b"y" * 200}, "cannot be met"),
        ({"name": b"\0llm-datadist-shm/nobody"}, "another host or another network namespace"),
        ({"proof": b""}, "not valid: name or proof"),
        ({"areas": []}, "0 areas, 1 to 16"),
        ({"areas": [(4096 * i, 4096) for i in range(1, 18)]}, "17 areas"),
        ({"areas": [(4096, 0)]}, "not valid: areas"),
        ({"areas": [(4096, -1)]}, "not valid: areas"),
        ({"areas": [(-4096, 4096)]}, "not valid: areas"),
        ({"areas": [(4096, 4096), (8191, 4096)]}, "areas overlap"),
        ({"areas": [((1 << 64) - 4096, 4096)]}, "beyond 2**64"),
    ],
)
def test_endpoint_that_cannot_be(reader: ShmTransport, changes: dict[str, Any], text: str) -> None:
    assert text in reason(reader, altered(reader.endpoint(PROOF), **changes))


def test_number_of_areas(area: Shared) -> None:
    for count in (0, 17):
        with pytest.raises(ValueError, match=f"1 to 16 areas, not {count}"):
            transport([area.area] * count)


@needs_root
def test_other_network_namespace(owner: ShmOwner) -> None:
    assert "another network namespace" in elsewhere(owner, prefix=["--net"])


@needs_root
def test_other_pid_namespace_is_no_obstacle(owner: ShmOwner) -> None:
    """SO_PEERCRED gives pid 0 there; the connection needs no pid."""
    assert elsewhere(owner, prefix=["--pid", "--fork"]).strip() == "readable 7"


# ---- who may ----------------------------------------------------------------------------------------------


def elsewhere(owner: ShmOwner, first: str = "", prefix: Sequence[str] = ()) -> str:
    """What a reader in a process of its own gets."""
    (base,) = owner.allocate([8], 0)
    owner.write(base, b"\x07" + bytes(7))
    program = f"""
import base64, sys
from tests.support.shm_pair import MIB, Shared, endpoint, settle, transport
from llm_datadist.testing.board import extents
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import TransportUnavailable
reader = transport([Shared(MIB).area])
{first}
try:
    channel = reader.open(endpoint(base64.b64decode(sys.argv[1])), deadline=0)
except TransportUnavailable as exc:
    print(exc)
else:
    settle(channel)
    print("readable" if channel.covers(extents([{base}], [(0, 8)])) else channel.refusal, end=" ")
    print(channel.read_word({base}, deadline=0))
"""
    blob = base64.b64encode(owner.endpoint.blob).decode()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [*([UNSHARE, *prefix] if prefix and UNSHARE else []), sys.executable, "-c", program, blob]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=50)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_p2_another_process_of_this_user(owner: ShmOwner) -> None:
    assert elsewhere(owner).strip() == "readable 7"


@needs_root
def test_p2_other_user_refuses_by_itself(owner: ShmOwner) -> None:
    """The reader runs as nobody; both users and the rule are named."""
    text = elsewhere(owner, NOBODY)
    for part in ("user id 0", "65534", "within one user"):
        assert part in text, text
    assert "the peer refused" not in text


@needs_root
@pytest.mark.parametrize("slow", [False, True], ids=["proof first", "proof late"])
@pytest.mark.rule("S.15")
def test_p2_other_user_is_refused_by_the_owner(owner: ShmOwner, slow: bool) -> None:
    """A reader that does not care: it has the proof, and gets no descriptor."""
    ignoring = f"{NOBODY}; from llm_datadist.transports import shm; shm.whose_refusal = lambda *uids: ''"
    if slow:  # the owner has closed by then
        ignoring += (
            "; import time; real = shm.credentials; shm.credentials = lambda s: (time.sleep(0.3), real(s))[1]"
        )
    text = elsewhere(owner, ignoring)
    assert "the peer refused: its memory belongs to user id 0, the reader runs as 65534" in text, text
    assert "readable" not in text


@needs_root
@pytest.mark.rule("S.30")
@pytest.mark.parametrize("known", [True, False], ids=["all users known", "a user namespace"])
def test_p2_who_could_be_anybody_is_not_the_same_user(known: bool) -> None:
    """65534 is nobody; in a user namespace it is every user of the host that it does not know as well."""
    program = "from llm_datadist.transports.shm_owner import whose_refusal as w; print(w(65534, 65534), w(65534, 0))"
    command = [sys.executable, "-c", program]
    if not known:
        command = [str(UNSHARE), "--user", "--map-user=65534", *command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=50)
    assert bool(ran.stdout.strip()) is not known, ran.stdout
    assert known or "stands for every user" in ran.stdout


@needs_root
@pytest.mark.rule("S.15", "S.17")
def test_p2_root_reads_a_user(reader: ShmTransport) -> None:
    with closing(ShmOwner(as_nobody=True)) as owner:
        (base,) = owner.allocate([8], 0)
        channel = opened(reader, owner.endpoint.blob)
        assert channel.covers(extents([base], [(0, 8)])), channel.refusal
        channel.close()


@pytest.mark.parametrize(
    "message", [b"x", b"", b"y" * 33, b"z" * 1000], ids=["short", "empty", "long", "huge"]
)
def test_whoever_says_something_else_is_shown_the_door(area: Shared, loop: Loop, message: bytes) -> None:
    with closing(transport([area.area], loop=loop)) as owned:
        with stranger(owned) as sock:
            sock.send(message)
            assert sock.recv(200)[:1] in (b"", shm_owner.REFUSED)
            assert sock.recv(200) == b""
        assert wait_until(lambda: not owned._giver._readers, WAIT_S)


def test_whoever_talks_after_the_answer_is_shown_the_door(area: Shared, loop: Loop) -> None:
    with closing(transport([area.area], loop=loop)) as owned, stranger(owned) as sock:
        sock.send(msgspec.msgpack.decode(owned.endpoint(PROOF))["proof"])
        message, fds, _, _ = socket.recv_fds(sock, 10, 10)
        for fd in fds:
            os.close(fd)
        assert message == shm_owner.GRANTED and len(fds) == 1
        sock.send(b"more?")
        assert sock.recv(10) == b""


def stranger(owned: ShmTransport) -> socket.socket:
    """A connection to an owner, without having shown anything."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WAIT_S)
    sock.connect(msgspec.msgpack.decode(owned.endpoint(PROOF))["name"])
    return sock


def test_r1_readers_are_bounded_and_forgotten(
    area: Shared, loop: Loop, reader: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READERS", 2)
    with closing(transport([area.area], loop=loop)) as owned:
        channels = [opened(reader, owned.endpoint(PROOF)) for _ in range(2)]
        assert not any(channel.refusal for channel in channels)
        assert "has 2 readers" in refused(reader, owned.endpoint(PROOF))
        channels[0].close()
        assert wait_until(lambda: len(owned._giver._readers) == 1, WAIT_S)
        for _ in range(100):
            channel = opened(reader, owned.endpoint(PROOF))
            assert not channel.refusal
            channel.close()
            assert wait_until(lambda: len(owned._giver._readers) == 1, WAIT_S)


def mapped(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


# ---- time -------------------------------------------------------------------------------------------------


def test_t2_an_owner_that_does_not_answer_delays_nobody(area: Shared, reader: ShmTransport) -> None:
    """``open`` waits for nothing, so two control threads may open each other; the first use waits shortly."""
    watch = Stopwatch()
    with closing(transport([area.area])) as silent:
        channel = reader.open(endpoint(silent.endpoint(PROOF)), deadline=0)
        assert watch.within(shm_memory.ANSWER_S / 2)
        watch = Stopwatch()
        source = extents([area.area.address], [(0, 8)])
        for _ in range(50):
            assert not channel.covers(source)
        assert watch.within(shm_memory.ANSWER_S + 1)
        assert "has not sent its memory yet" in channel.refusal
        fault = channel.read(Segments(source, extents([8], [(0, 8)]))).wait(deadline=soon()).fault
        assert fault is not None and fault.kind is FaultKind.CHANNEL and "not sent" in fault.text


def test_t2_a_late_answer_is_taken(reader: ShmTransport, owner: ShmOwner) -> None:
    (base,) = owner.allocate([8], 0)
    source = extents([base], [(0, 8)])
    owner.stop()
    channel = reader.open(owner.endpoint, deadline=0)
    assert not channel.covers(source)
    watch = Stopwatch()
    assert not channel.settle(deadline=watch.began + 0.2) and watch.elapsed >= 0.2
    resumed = threading.Timer(0.05, owner.resume)
    resumed.start()
    assert channel.settle(deadline=soon()), "whoever has nothing else waits for it"
    resumed.join()
    assert channel.covers(source) and not channel.refusal
    channel.close()
    assert channel.settle(deadline=0), "nothing comes any more"


def test_owner_that_closes_is_lost(area: Shared, loop: Loop, reader: ShmTransport) -> None:
    """Also where something that we do not know of, as a child of a C library's, has inherited its sockets."""
    owned = transport([area.area], loop=loop)
    channel = opened(reader, owned.endpoint(PROOF))
    assert word(channel, area.area.address) == 0
    inherited = [sock.dup() for sock in (owned._meeting._listener, *owned._giver._readers)]
    assert len(inherited) == 2
    owned.close()
    owned.close()
    fault = word(channel, area.area.address)
    assert isinstance(fault, Fault) and fault.kind is FaultKind.PEER_LOST
    assert "cannot be met" in reason(reader, owned.endpoint(PROOF))
    for sock in inherited:
        sock.close()


def test_closing_the_transport_closes_its_channels_and_unmaps(area: Shared, loop: Loop) -> None:
    fds, maps = len(os.listdir("/proc/self/fd")), len(mapped("memfd:test"))
    with closing(transport([area.area], loop=loop)) as owned, closing(Shared(MIB)) as own:
        reader = transport([own.area])
        channel = opened(reader, owned.endpoint(PROOF))
        assert len(mapped("memfd:test")) == maps + 2
        reader.close()
        reader.close()
        assert len(mapped("memfd:test")) == maps + 1
        fault = word(channel, area.area.address)
        assert isinstance(fault, Fault) and fault.kind is FaultKind.CANCELLED
        assert "closed" in reason(reader, owned.endpoint(PROOF))
    assert (len(os.listdir("/proc/self/fd")), len(mapped("memfd:test"))) == (fds, maps)


def test_a_closed_channel_keeps_its_mapping_until_the_last_read_ends(
    area: Shared, loop: Loop, reader: ShmTransport
) -> None:
    with closing(transport([area.area], loop=loop)) as owned:
        channel = opened(reader, owned.endpoint(PROOF))
        before = len(mapped("memfd:test"))
        held = channel.memory.hold()
        assert held.take()
        channel.close()
        assert len(mapped("memfd:test")) == before and not channel.memory.gone()
        assert not channel.memory.hold().take()
        held.drop()
        assert len(mapped("memfd:test")) == before - 1


@pytest.mark.rule("S.15")
def test_what_is_mapped_cannot_be_written(area: Shared, loop: Loop, reader: ShmTransport) -> None:
    with closing(transport([area.area], loop=loop)) as owned:
        channel = opened(reader, owned.endpoint(PROOF))
        (mapping,) = (m for m in mapped("memfd:test") if " r--s " in m)
        start = int(mapping.split("-")[0], 16)
        assert start - area.area.address == channel.memory.areas.shift_at(area.area.address, MIB)
