"""Transport ``nixl`` with NIXL itself: processes that die, stop and start again; TCP between two networks."""

from __future__ import annotations

import base64
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import msgspec
import pytest

from llm_datadist.testing.board import PROMPT_S
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports.nixl_told import Endpoint
from tests.support import netns
from tests.support.nixl_pair import NixlOwner, need_nixl
from tests.support.nixl_reader import NixlReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20
ON_HOST: dict[str, str] = {}  # what UCX chooses
OVER_TCP = {"UCX_TLS": "tcp"}
ENVIRONMENTS = pytest.mark.parametrize("env", [ON_HOST, OVER_TCP], ids=["host", "tcp"])


@pytest.fixture(autouse=True)
def _nixl() -> None:
    need_nixl()


@contextlib.contextmanager
def linked(
    env: dict[str, str], nets: Sequence[netns.Namespace] = ()
) -> Iterator[tuple[NixlOwner, NixlReader]]:
    """An owner and a reader, each in its network if there are some, and on that network's device."""
    prefixes = [net.prefix for net in nets] or [(), ()]
    envs = [{**env, "UCX_NET_DEVICES": net.device} for net in nets] or [env, env]
    with (
        closing(NixlOwner(prefixes[0], envs[0])) as owner,
        closing(NixlReader(prefixes[1], envs[1])) as reader,
    ):
        reader.link(owner)
        yield owner, reader


def told(owner: NixlOwner, reader: NixlReader, nbytes: int, seed: int = 1) -> int:
    """Memory of the owner that the reader knows, and as much of its own."""
    (base,) = owner.allocate([nbytes], seed)
    reader.admit(owner.token(base))
    reader.call("map", nbytes=nbytes)
    return base


def check_read(reader: NixlReader, base: int, nbytes: int, seed: int = 1) -> None:
    answer = reader.call("read", there=base, nbytes=nbytes, time_s=60)
    assert (answer["fault"], answer["nbytes"]) == (None, nbytes), answer
    assert reader.call("holds", seed=seed, nbytes=nbytes)
    reader.call("refill")


@ENVIRONMENTS
def test_t3_owner_killed_in_the_middle(env: dict[str, str]) -> None:
    """PEER_LOST within a second, nothing is written afterwards, the next link works."""
    nbytes = 256 * MIB
    with linked(env) as (owner, reader):
        base = told(owner, reader, nbytes)
        reader.call("begin", there=base, nbytes=nbytes, time_s=60)
        owner.kill()
        watch = Stopwatch()
        answer = reader.call("end")
        assert answer["fault"] == "PEER_LOST", answer
        assert answer["text"]
        assert watch.within(PROMPT_S)
        assert answer["nbytes"] < nbytes
        reader.call("refill")
        for _ in range(2):
            again = reader.call("read", there=base, nbytes=MIB, time_s=60)
            assert again["fault"] == "PEER_LOST"
            assert again["took_s"] < PROMPT_S
        assert reader.call("word", address=base)["fault"] == "PEER_LOST"
        assert reader.call("changed") == 0
        reader.call("close")
        with closing(NixlOwner(env=env)) as another:
            reader.link(another)
            check_read(reader, told(another, reader, MIB, 7), MIB, 7)


def test_t3_a_reader_outlives_its_owners() -> None:
    """UCX calls abort() when an endpoint whose peer has just died is destroyed before it had time to notice."""
    with closing(NixlReader()) as reader:
        for _ in range(10):
            with closing(NixlOwner()) as owner:
                reader.link(owner)
                base = told(owner, reader, 4096)
                assert isinstance(reader.call("word", address=base), int)
                owner.kill()
                assert reader.call("word", address=base)["fault"] == "PEER_LOST"
                reader.call("close")


def test_t4_owner_stopped_in_the_middle() -> None:
    """Over TCP it must answer: TIMEOUT soon after the deadline, and nothing comes when it goes on."""
    nbytes = 256 * MIB
    with linked(OVER_TCP) as (owner, reader):
        base = told(owner, reader, nbytes)
        reader.call("begin", there=base, nbytes=nbytes, time_s=0.5)
        owner.stop()
        answer = reader.call("end")
        assert answer["fault"] == "TIMEOUT", answer
        assert answer["took_s"] < 0.5 + 0.3 + PROMPT_S
        reader.call("refill")
        owner.resume()
        time.sleep(1)  # for bytes that come late
        assert reader.call("changed") == 0


@ENVIRONMENTS
def test_memory_registered_again_at_the_same_address(env: dict[str, str]) -> None:
    with linked(env) as (owner, reader):
        base = told(owner, reader, MIB)
        check_read(reader, base, MIB)
        for _ in range(3):
            owner.call("unregister", address=base)
            owner.write(base, b"\0" * 64)
            reader.admit(owner.register(base, MIB))
            answer = reader.call("read", there=base, nbytes=64, time_s=60)
            assert answer["fault"] is None
            assert not reader.call("holds", seed=1, nbytes=64)


@ENVIRONMENTS
def test_ranges_that_overlap(env: dict[str, str]) -> None:
    """NIXL itself finds only the last one that starts before."""
    with linked(env) as (owner, reader):
        base = told(owner, reader, 4 * MIB)
        for at, nbytes in ((MIB, MIB), (0, 2 * MIB), (0, 4 * MIB), (3 * MIB, MIB)):
            reader.admit(owner.register(base + at, nbytes))
            check_read(reader, base, 4 * MIB)


def test_an_owner_that_has_started_again_is_another() -> None:
    with linked(OVER_TCP) as (owner, reader):
        base = told(owner, reader, MIB)
        check_read(reader, base, MIB)
        owner.kill()
        with closing(NixlOwner(env=OVER_TCP)) as again:
            token = again.token(again.allocate([MIB], 2)[0])
            reader.admit(token)
            assert reader.call("read", there=base, nbytes=MIB, time_s=60)["fault"] == "PEER_LOST"
            reader.link(again)
            check_read(reader, told(again, reader, MIB, 3), MIB, 3)


def test_two_networks() -> None:
    """UCX over TCP, told which device to use; a word; the owner killed."""
    with netns.joined(slow=False) as nets, linked(OVER_TCP, nets) as (owner, reader):
        base = told(owner, reader, 64 * MIB)
        check_read(reader, base, 64 * MIB)
        owner.write(base, (77).to_bytes(8, "little"))
        assert reader.call("word", address=base) == 77
        owner.kill()
        assert reader.call("read", there=base, nbytes=MIB, time_s=60)["fault"] == "PEER_LOST"


def test_a_slow_network_ends_at_the_deadline() -> None:
    """10 MB/s: transfers become small enough for the deadline to be kept."""
    with netns.joined() as nets, linked(OVER_TCP, nets) as (owner, reader):
        base = told(owner, reader, 64 * MIB)
        check_read(reader, base, 8 * MIB)
        answer = reader.call("read", there=base, nbytes=64 * MIB, time_s=1)
        assert answer["fault"] == "TIMEOUT"
        assert answer["took_s"] < 1 + 0.3 + PROMPT_S
        check_read(reader, base, MIB)


def test_p7_idle_processes_sleep() -> None:
    with linked(ON_HOST) as (owner, reader):
        check_read(reader, told(owner, reader, MIB), MIB)
        before = reader.call("cpu_s")
        time.sleep(3)
        assert reader.call("cpu_s") - before < 0.05


def test_a_forked_child_ends_and_disturbs_nobody() -> None:
    with linked(ON_HOST) as (owner, reader):
        base = told(owner, reader, MIB)
        check_read(reader, base, MIB)
        assert reader.call("fork") == 0
        check_read(reader, base, MIB)


def test_loading_changes_nothing_else() -> None:
    """NIXL's package would take the handlers of ``logging`` away, and torch would cost a second."""
    with closing(NixlReader()) as reader:
        assert reader.call("state") == {"torch": False, "handlers": ["StreamHandler"], "raise": True}


_MAKE = """
import secrets
from llm_datadist.transports.nixl import NixlTransport
NixlTransport(secrets.token_bytes)
"""


def test_an_error_of_ucx_is_a_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAKE],
        env={"UCX_TLS": "nonsense", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "TransportUnavailable: NIXL has no agent with UCX for us" in last, done.stderr


def test_the_package_does_not_load_it() -> None:
    code = "import sys, llm_datadist, llm_datadist.transports.nixl; print(any('nixl_cu' in m for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.rule("S.41")
def test_g16_a_peer_of_another_host_cannot_have_a_process_of_this_one_read() -> None:
    """In the address of UCX that it gives, the process to copy from is one of the reader's host."""
    with closing(NixlOwner(env=ON_HOST)) as owner, closing(NixlOwner(env=ON_HOST)) as victim:
        told = msgspec.msgpack.decode(owner.endpoint.blob, type=Endpoint)
        mine, theirs = (one.pid.to_bytes(4, "little") for one in (owner, victim))
        assert told.metadata.count(mine) == 1, "not what this test knows"
        forged = msgspec.structs.replace(told, metadata=told.metadata.replace(mine, theirs))
        blob = msgspec.msgpack.encode(forged)
        (base,) = owner.allocate([MIB], 1)
        with closing(NixlReader(env=ON_HOST)) as reader:
            reader.call("open", blob=base64.b64encode(blob).decode(), within_host=False)
            reader.admit(owner.token(base))
            reader.call("map", nbytes=MIB)
            check_read(reader, base, MIB, 1)
