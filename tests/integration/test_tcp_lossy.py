"""TCP reads between two network namespaces, 20 ms apart, where one packet in a hundred is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.lossy import lossy
from tests.support.netns import Namespace

Net = tuple[Namespace, Namespace, str]

# Reader: opens the channel, reads one small piece (a connection, and how far it is), then the whole.
_READER = """
import sys, time, secrets
import numpy as np
from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.owner import OwnerProcess, pattern
from llm_datadist.testing.stream_owner import ExtentsSource, encode_extents, first_frame
from llm_datadist.transports.seam import PeerEndpoint
from llm_datadist.transports.tcp import TcpTransport

prefix, host, nbytes, stripes = sys.argv[1].split(), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
owner = OwnerProcess([*prefix, sys.executable, "-m", "llm_datadist.testing.stream_owner"])
token = secrets.token_bytes(16)
host, port = owner.call("listen", token=token.hex(), host=host)
(address,) = owner.allocate([nbytes], 7)
transport = TcpTransport(ExtentsSource(), first_frame, stripes=stripes)
channel = transport.open(PeerEndpoint(1, b"", token, (host, port), lambda n: None), deadline=0)

def extents(base, size):
    return Extents.of(np.array([base], np.uint64), np.zeros(1, np.uint64), np.array([size], np.uint64))

memory = np.zeros(nbytes, np.uint8)
for size in (1000, nbytes):
    plan = Segments(encode_extents(extents(address, size)), extents(memory.ctypes.data, size))
    begin = time.monotonic()
    progress = channel.read(plan).wait(deadline=begin + 60)
    taken = time.monotonic() - begin
    assert progress.fault is None, progress.fault
assert np.array_equal(memory, pattern(7, nbytes))
print(len(channel.pool.sockets()), taken)
transport.close()
owner.kill()
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with lossy(20, 1.0) as it:
        yield it


def read(net: Net, nbytes: int, stripes: int) -> tuple[int, float]:
    """The connections that it took, and the seconds."""
    owner, reader, _ = net
    args = [" ".join(owner.prefix), owner.address, str(nbytes), str(stripes)]
    command = [*reader.prefix, sys.executable, "-c", _READER, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    connections, seconds = done.stdout.split()
    return int(connections), float(seconds)


def test_every_byte_arrives_over_several_connections(net: Net) -> None:
    nbytes = 4 << 20
    connections, several_s = read(net, nbytes, 0)
    assert connections == 4
    one, one_s = read(net, nbytes, 1)
    assert one == 1
    print(f"{net[2]}: {nbytes} bytes in {several_s:.1f} s over 4 connections, in {one_s:.1f} s over one")
