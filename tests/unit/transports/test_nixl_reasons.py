"""Every text with which transport ``nixl`` says that it is not to be had is forced, and names the cause."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from llm_datadist.transports import _nixl, nixl, nixl_told
from llm_datadist.transports._nixl import NixlRefused
from llm_datadist.transports.nixl import NixlTransport, check_worth_it
from llm_datadist.transports.seam import NOT_THIS_CONNECTION, TransportUnavailable
from tests.support import reasons
from tests.support.fake_nixl import FakeAgent, World
from tests.support.local_pair import PROOF
from tests.support.nixl_rig import Rig, endpoint

Force = Callable[[pytest.MonkeyPatch, Path], None]


def _open(blob: bytes) -> None:
    rig = Rig()
    try:
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)
    finally:
        rig.close()


def _endpoint(rig: Rig, **changes: object) -> bytes:
    told = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=nixl_told.Endpoint)
    return msgspec.msgpack.encode(msgspec.structs.replace(told, **changes))


def _open_changed(**changes: object) -> None:
    rig = Rig()
    try:
        rig.reader.open(endpoint(_endpoint(rig, **changes)), deadline=time.monotonic() + 1)
    finally:
        rig.close()


def no_devices(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(_nixl, "check_installed", lambda: None)
    patch.setattr(nixl, "RDMA_DEVICES", tmp / "infiniband")
    check_worth_it()


def no_device(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(_nixl, "check_installed", lambda: None)
    patch.setattr(nixl, "RDMA_DEVICES", tmp)
    check_worth_it()


def no_registration(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    def refuse(agent: FakeAgent, memory: str, rows: object) -> None:
        raise NixlRefused("registerMem: NIXL_ERR_BACKEND")

    patch.setattr(FakeAgent, "register", refuse)
    world = World()
    try:
        NixlTransport(lambda n: bytes(n), agents=world.agents)
    finally:
        assert not world.living, "its agent stays"


def another_version(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(FakeAgent, "metadata", lambda *args: b"nixlSerDes2|")
    world = World()
    try:
        NixlTransport(lambda n: bytes(n), agents=world.agents)
    finally:
        assert not world.living, "its agent stays"


def nowhere(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    _open_changed(nonce_address=8)


def negative(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    _open_changed(nonce_address=-1)


def garbage(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    _open(b"garbage")


def half_a_row(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    _open_changed(rows=b"123")


def closed(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    rig = Rig()
    blob = rig.owner.endpoint(PROOF)
    rig.close()
    rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)


def unreachable(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    rig = Rig()
    rig.world.unreachable |= {rig.owner._serving.name}
    try:
        rig.open()
    finally:
        rig.close()


def another_process(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    rig = Rig()
    blob = rig.owner.endpoint(PROOF)
    rig.owner.hide(PROOF)
    try:
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)
    finally:
        rig.close()


def another_connection(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    _open_changed(proof=b"0" * 32)


def not_installed(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)
    for package in _nixl._PACKAGES:
        patch.delitem(sys.modules, f"{package}._bindings", raising=False)
    NixlTransport(lambda n: bytes(n))


def not_found(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)
    patch.setattr(nixl, "RDMA_DEVICES", tmp)
    check_worth_it()


def not_loadable(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    def fail(package: str) -> None:
        raise ImportError("libucp.so.0: cannot open shared object file")

    patch.setattr(_nixl, "_load", fail)
    NixlTransport(lambda n: bytes(n))


def no_agent(patch: pytest.MonkeyPatch, tmp: Path) -> None:
    def fail(agent: object, name: str, options: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    def nothing(*args: object) -> None:
        pass

    agent = type("nixlAgent", (), {"__init__": nothing, "createBackend": fail, "getNotifs": nothing})
    patch.setattr(
        _nixl,
        "_bindings",
        lambda: SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=agent, NIXL_THREAD_SYNC_RW=0),
    )
    NixlTransport(lambda n: bytes(n))


NOT_VALID = "the peer's endpoint of transport nixl is not valid: {}"
NO_DEVICE = (
    "there is no RDMA device here ({}), and over TCP transport tcp is faster and safer; "
    "transfer_backend='nixl' takes it all the same"
)
FIRST_READ = "a first read with NIXL failed: {}"
FORCED: dict[str, tuple[Force, ...]] = {
    NO_DEVICE: (no_devices, no_device),
    "NIXL registers no memory here: {}": (no_registration,),
    "this NIXL is of a version that is not known here: {}": (another_version,),
    NOT_VALID: (garbage, half_a_row, negative),
    "the peer's endpoint of transport nixl is not valid: its proof is not in what it tells of": (nowhere,),
    "transport nixl of this process is closed": (closed,),
    FIRST_READ: (unreachable,),
    "NIXL reaches another process than the one of the handshake": (another_process,),
    "NIXL has no agent with UCX for us: {}": (no_agent,),
}
# What is raised without a text there.
PASSED_ON: dict[str, dict[str, Force]] = {
    "NOT_THIS_CONNECTION": {NOT_THIS_CONNECTION: another_connection},
    "_NOT_INSTALLED": {_nixl._NOT_INSTALLED: not_found},
    "'; '.join(failures) or _NOT_INSTALLED": {
        _nixl._NOT_INSTALLED: not_installed,
        "NIXL ({}) cannot be loaded: {}": not_loadable,
    },
}
CASES = [(t, force) for t, forces in FORCED.items() for force in forces] + [
    case for forced in PASSED_ON.values() for case in forced.items()
]


@pytest.mark.parametrize(("template", "force"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_p2_every_reason_is_told(
    template: str, force: Force, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TransportUnavailable) as told:
        force(monkeypatch, tmp_path)
    text = str(told.value)
    assert reasons.pattern(template).fullmatch(text), text
    assert "FaultKind" not in text and not text.startswith("("), "a text for users"


def test_every_text_in_the_source_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "TRANSPORTS", ("nixl*.py", "_nixl.py"))
    monkeypatch.setattr(reasons, "MAKERS", {})
    assert reasons.templates() == set(FORCED)
    assert reasons.passed_on() == set(PASSED_ON)


def test_with_a_device_it_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_nixl, "check_installed", lambda: None)
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    check_worth_it()


def test_an_agent_that_cannot_be_made_for_a_read_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason for not linking; of a link that is up, the end of one read."""
    rig = Rig()
    rig.tell(rig.source, nbytes=4096)
    made = rig.channel._agents

    def fail(name: str) -> FakeAgent:
        raise TransportUnavailable("NIXL has no agent with UCX for us: out of descriptors")

    monkeypatch.setattr(rig.channel, "_agents", fail)
    rig.channel._drop_made()
    progress = rig.read()
    assert progress.fault is not None and "out of descriptors" in progress.fault.text
    assert not np.any(rig.here)
    monkeypatch.setattr(rig.channel, "_agents", made)
    rig.tell(rig.source, nbytes=4096)
    rig.check()
    rig.close()
