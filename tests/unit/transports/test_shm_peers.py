"""Transport ``shm``: peers that lie, systems that refuse, children that are forked."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import secrets
import select
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llm_datadist.devices.mapping import unmap
from llm_datadist.devices.shared_memory import create_memfd, seal
from llm_datadist.testing.board import extents, soon
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import shm_memory, shm_owner
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, FaultKind, TransportUnavailable
from llm_datadist.transports.shm import ShmChannel, ShmTransport
from tests.support.local_pair import PROOF, Loop
from tests.support.shm_pair import MIB, Reader, Shared, ShmOwner, endpoint, settle, transport
from tests.support.world import wait_until

WAIT_S = 10


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


def word(channel: ShmChannel, address: int) -> int | Fault:
    return channel.read_word(address, deadline=soon())


# ---- a peer that lies -------------------------------------------------------------------------------------


def unsealed(nbytes: int) -> int:
    return create_memfd("test", nbytes)


def sealed(nbytes: int) -> int:
    fd = create_memfd("test", nbytes)
    assert not seal(fd)
    return fd


def plain_file(nbytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        return os.dup(file.fileno())


def grown_only(nbytes: int) -> int:
    """Sealed against growth, and nothing that matters."""
    fd = create_memfd("test", nbytes)
    fcntl.fcntl(fd, 1033, 4)
    return fd


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [unsealed(MIB)], "could still shrink"),
        (lambda: [grown_only(MIB)], "could still shrink"),
        (lambda: [plain_file(MIB)], "could still shrink"),
        (lambda: [os.open("/dev/zero", os.O_RDWR)], "could still shrink"),
        (lambda: [sealed(MIB - 1)], f"sent {MIB - 1} bytes of memory and announced {MIB}"),
        (lambda: [], "sent 0 areas of 1"),
        (lambda: [sealed(MIB), sealed(MIB)], "sent 2 areas of 1"),
        (lambda: [sealed(16) for _ in range(20)], "sent 16 areas of 1"),
    ],
    ids=["unsealed", "grow", "file", "device", "small", "none", "two", "more than there can be"],
)
@pytest.mark.rule("S.16")
def test_z3_descriptors_that_are_no_good(
    reader: ShmTransport, make: Callable[[], list[int]], text: str
) -> None:
    """Each is closed, nothing is mapped."""
    fds = make()
    answer = lambda sock: socket.send_fds(sock, [shm_owner.GRANTED], fds)  # noqa: E731
    try:
        channel = lied_to(reader, answer)
        assert text in channel.refusal
        assert not channel.covers(extents([4096], [(0, 8)]))
        assert isinstance(word(channel, 4096), Fault)
        assert not any(" r--s " in line for line in mapped("memfd:test"))
        channel.close()
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\1no", "refused: no"),
        (b"\1\xff\xfe", "refused: "),
        (b"\2", "without an answer"),
        (b"\0x", "refused: x"),
    ],
)
def test_z3_answers_that_are_no_good(reader: ShmTransport, message: bytes, text: str) -> None:
    channel = lied_to(reader, lambda sock: sock.send(message))
    assert text in channel.refusal and not channel.covers(extents([4096], [(0, 8)]))
    channel.close()


def test_a_peer_that_closes_instead_of_answering(reader: ShmTransport) -> None:
    channel = lied_to(reader, lambda sock: None)
    assert "without an answer" in channel.refusal
    fault = word(channel, 4096)
    assert isinstance(fault, Fault) and fault.kind is FaultKind.PEER_LOST
    channel.close()


def test_a_refusal_by_a_peer_that_has_not_read_the_proof(reader: ShmTransport) -> None:
    """The kernel reports a reset before it gives the message."""
    channel = lied_to(reader, lambda sock: sock.send(b"\1for a reason"), listening=False)
    assert channel.refusal == "the peer refused: for a reason"
    channel.close()


def lied_to(
    reader: ShmTransport, answer: Callable[[socket.socket], object], listening: bool = True
) -> ShmChannel:
    """A channel whose owner, at another place, answers by itself."""
    name = b"\0llm-datadist-shm/" + secrets.token_hex(8).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(1)
        blob = altered(reader.endpoint(PROOF), name=name, areas=[(4096, MIB)])
        channel = reader.open(endpoint(blob), deadline=0)
        sock, _ = listener.accept()
        with sock:
            assert not listening or sock.recv(100) == PROOF
            answer(sock)
        settle(channel)
    return channel


def mapped(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


# ---- where things are missing -----------------------------------------------------------------------------


def test_a_reader_without_descriptors_says_so(area: Shared, loop: Loop) -> None:
    """The kernel truncates what it cannot pass on."""
    with (
        closing(transport([area.area], loop=loop)) as owned,
        closing(Reader([area.area], Movers(0), deaf=True)) as reader,
    ):
        channel = reader.open(endpoint(owned.endpoint(PROOF)), deadline=0)
        assert wait_until(lambda: any(owned._giver._readers.values()), WAIT_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            assert channel.memory.hear() > 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert f"all {spare} descriptors" in channel.refusal and "RLIMIT_NOFILE" in channel.refusal
        assert not channel.covers(extents([area.area.address], [(0, 8)]))
        open_here = len(os.listdir("/proc/self/fd"))
        assert not channel.memory.hear() and not channel.refusal
        assert channel.covers(extents([area.area.address], [(0, 8)]))
        assert len(os.listdir("/proc/self/fd")) == open_here


def test_a_listener_that_cannot_be_adopted_leaves_nothing(area: Shared) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no loop")

    with pytest.raises(RuntimeError, match="no loop"):
        ShmTransport([area.area], None, refuse, refuse, secrets.token_bytes)  # type: ignore[arg-type]


def test_an_area_that_cannot_be_mapped_here(
    area: Shared, loop: Loop, reader: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    with closing(transport([area.area], loop=loop)) as owned:
        with monkeypatch.context() as patch:
            patch.setattr(shm_memory, "map_memory", refuse)
            channel = reader.open(endpoint(owned.endpoint(PROOF)), deadline=0)
            assert channel.settle(deadline=soon())
            assert (
                "cannot be mapped: Cannot allocate memory" in channel.refusal
                and "RLIMIT_AS" in channel.refusal
            )
            assert not channel.covers(extents([area.area.address], [(0, 8)]))
        assert channel.settle(deadline=soon()) and not channel.refusal
        assert channel.covers(extents([area.area.address], [(0, 8)]))
        settle(channel)
        assert not is_readable(channel.memory._sock), "the answer stays, with its descriptors"


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


# ---- forks ------------------------------------------------------------------------------------------------


def test_f1_a_child_of_the_owner_does_not_keep_it_alive(reader: ShmTransport) -> None:
    """The owner is killed while its child lives on with what it inherited."""
    with closing(ShmOwner()) as owner:
        (base,) = owner.allocate([8], 0)
        channel = opened(reader, owner.endpoint.blob)
        child = owner.call("fork")
        try:
            assert isinstance(word(channel, base), int)
            owner.kill()
            watch = Stopwatch()
            fault = word(channel, base)
            assert isinstance(fault, Fault) and fault.kind is FaultKind.PEER_LOST
            assert watch.within(1)
            assert "cannot be met" in reason(reader, owner.endpoint.blob)
        finally:
            os.kill(child, signal.SIGKILL)
        channel.close()


def test_t3_large_memory_is_unmapped_by_nobody_who_waits(
    area: Shared, loop: Loop, reader: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder may be the control thread; where the owner has ended, its memory is freed here."""
    go_on, taken = threading.Event(), list[int]()

    def slow(address: int, nbytes: int) -> None:
        if nbytes > MIB:
            assert go_on.wait(WAIT_S)
            taken.append(nbytes)
        unmap(address, nbytes)

    with (
        closing(Shared(128 * MIB)) as large,
        closing(transport([area.area, large.area], loop=loop)) as owned,
    ):
        channel = opened(reader, owned.endpoint(PROOF))
        maps = len(mapped("memfd:test"))
        monkeypatch.setattr(shm_memory, "unmap", slow)
        channel.close()
        assert not taken
        go_on.set()
        assert wait_until(lambda: taken == [128 * MIB] and len(mapped("memfd:test")) < maps)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_f1_a_child_of_the_reader_has_none_of_it(area: Shared, loop: Loop) -> None:
    others = set(filter(is_open_socket, os.listdir("/proc/self/fd")))
    with closing(transport([area.area], loop=loop)) as owned, closing(transport([area.area])) as reader:
        channel = opened(reader, owned.endpoint(PROOF))
        pid = os.fork()
        if not pid:
            reader.close_after_fork()
            sockets = [fd for fd in os.listdir("/proc/self/fd") if is_open_socket(fd)]
            owned.close_after_fork()
            fewer = [fd for fd in sockets if is_open_socket(fd)]
            gone = not any(" r--s " in line for line in mapped("memfd:test"))
            os._exit(0 if gone and len(sockets) - len(fewer) == 2 and others.issuperset(fewer) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert word(channel, area.area.address) == 0


def is_open_socket(fd: str) -> bool:
    try:
        return re.match("socket:", os.readlink(f"/proc/self/fd/{fd}")) is not None
    except OSError:
        return False
