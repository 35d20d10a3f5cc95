"""Which transports are opened for a new peer, in which order, and what is closed again."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist._engine.probing import Probing
from llm_datadist._engine.transport_set import CAPS, WORDS
from llm_datadist._wire.messages import Identity
from llm_datadist.transports.seam import PeerEndpoint, TransportUnavailable

ALL = ("shm", "local", "nixl", "tcp")


class Channel:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Transport:
    """Opens, unless it has a reason not to, or an exception."""

    def __init__(self, name: str, log: list[str], refusal: str | BaseException = "") -> None:
        self.name, self.caps = name, CAPS[name]
        self._log, self._refusal = log, refusal
        self.channels: list[Channel] = []

    def open(self, peer: PeerEndpoint, *, deadline: float) -> Channel:
        self._log.append(f"{self.name} {peer.blob.decode()}")
        if isinstance(self._refusal, BaseException):
            raise self._refusal
        if self._refusal:
            raise TransportUnavailable(self._refusal)
        self.channels.append(Channel())
        return self.channels[-1]


class Scene:
    """An engine's transports and a peer that offers some."""

    def __init__(
        self, *, refusals: dict[str, Any] | None = None, missing: dict[str, str] | None = None
    ) -> None:
        refusals, self.missing = refusals or {}, missing or {}
        self.log: list[str] = []
        names = [name for name in ALL if name not in self.missing]
        self.opened = {name: Transport(name, self.log, refusals.get(name, "")) for name in names}
        self.stream = self.opened["tcp"]
        self.words = self.opened.get("shm")

    def run(self, *offers: str, backend: str = "auto", theirs: str = "auto") -> tuple[Any, Any]:
        endpoints = {name: name.upper().encode() for name in offers}
        peer = Identity(cluster_id=9, instance=b"", role=1, accessible=False, backend=theirs)

        def endpoint(name: str) -> PeerEndpoint:
            return PeerEndpoint(9, endpoints[name], b"", None, lambda count: None)

        transports: Any = SimpleNamespace(
            opened=self.opened, missing=self.missing, stream=self.stream, words=self.words
        )
        return Probing(transports, backend, peer, endpoints, endpoint).run()

    def channels(self) -> list[Channel]:
        return [channel for transport in self.opened.values() for channel in transport.channels]


@pytest.mark.parametrize(
    ("refusals", "offers", "ways", "tried"),
    [
        ({}, ALL, ("shm", "local"), ["shm SHM", "local LOCAL", "tcp TCP"]),
        ({"shm": "no"}, ALL, ("local",), ["shm SHM", "local LOCAL", "tcp TCP"]),
        ({"shm": "no", "local": "no"}, ALL, ("nixl", "tcp"), ["shm SHM", "local LOCAL", "nixl NIXL", "tcp TCP"]),
        ({"local": "no"}, ALL, ("shm", "nixl", "tcp"), ["shm SHM", "local LOCAL", "nixl NIXL", "tcp TCP"]),
        ({"local": "no", "nixl": "no"}, ("local", "nixl", "tcp"), ("tcp",), ["local LOCAL", "nixl NIXL", "tcp TCP"]),
        ({}, ("tcp", "nixl"), ("nixl", "tcp"), ["nixl NIXL", "tcp TCP"]),
        ({}, ("tcp",), ("tcp",), ["tcp TCP"]),
        ({}, ("nixl",), ("nixl",), ["nixl NIXL"]),
    ],
)  # fmt: skip
def test_opens_until_one_reaches_all(
    refusals: dict[str, str], offers: tuple[str, ...], ways: tuple[str, ...], tried: list[str]
) -> None:
    scene = Scene(refusals=refusals)
    choice, peer = scene.run(*offers)
    assert choice.names == ways == tuple(way.name for way in peer.ways)
    assert scene.log == tried
    assert not any(channel.closed for channel in scene.channels())
    assert (peer.serving is not None) == ("tcp" in offers), "the peer may need connections where we do not"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; all "),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (MemoryError(), "RLIMIT_AS"),
    ],
)
@pytest.mark.parametrize(
    ("failing", "ways"),
    [
        (("shm",), ("local",)),
        (("shm", "local"), ("nixl", "tcp")),
        (("local", "nixl"), ("shm", "tcp")),
        (("shm", "local", "nixl"), ("tcp",)),
        (("tcp",), ("shm", "local")),
    ],
)
def test_g8_a_failure_of_one_is_not_taken_for_a_failure_of_all(
    error: Exception, words: str, failing: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    scene = Scene(refusals=dict.fromkeys(failing, error))
    choice, peer = scene.run(*ALL)
    assert choice.names == ways == tuple(way.name for way in peer.ways)
    told = {reason.partition(": ")[0]: reason for reason in peer.reasons}
    for name in failing:
        if name in told:  # tcp stands for itself: who is read by local has no need of it
            assert f"{name}: it cannot be opened: " in told[name] and words in told[name]
    assert not any(channel.closed for channel in scene.channels())


def test_g8_a_failure_of_all_leaves_nothing_open() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    scene = Scene(refusals=dict.fromkeys(("local", "nixl", "tcp"), error))
    choice, peer = scene.run("local", "nixl", "tcp")
    assert peer is None and choice.names == ()
    assert sum("Too many open files" in reason for reason in choice.reasons) == 3


def test_g8_a_bug_of_one_leaves_nothing_open() -> None:
    scene = Scene(refusals={"tcp": ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        scene.run(*ALL)
    assert scene.channels() and all(channel.closed for channel in scene.channels())


@pytest.mark.parametrize("side", ["backend", "theirs"])
def test_what_is_forced_is_the_only_one(side: str) -> None:
    scene = Scene()
    choice, peer = scene.run(*ALL, **{side: "nixl"})  # type: ignore[arg-type]
    assert choice.names == ("nixl",) == tuple(way.name for way in peer.ways)
    assert choice.reasons == ("nixl: chosen, forced by transfer_backend='nixl'",)
    assert scene.log == ["nixl NIXL", "tcp TCP"]


def test_nothing_that_works_leaves_nothing_open() -> None:
    """Forced, and the peer does not answer on it; the stream was opened beside it."""
    scene = Scene(refusals={"nixl": "UCX finds no way"})
    choice, peer = scene.run(*ALL, backend="nixl")
    assert peer is None and choice.names == ()
    assert choice.reasons == ("nixl: UCX finds no way",)
    assert scene.channels() and all(channel.closed for channel in scene.channels())


def test_both_force_another() -> None:
    scene = Scene()
    choice, peer = scene.run(*ALL, backend="nixl", theirs="tcp")
    assert peer is None and choice.reasons[0] == "transfer_backend is 'nixl' here and 'tcp' at the peer"
    assert all(channel.closed for channel in scene.channels())


def test_what_is_missing_here_is_a_reason_and_is_not_tried() -> None:
    scene = Scene(missing={"nixl": "NIXL is not installed", "shm": "no memfd"})
    choice, peer = scene.run("nixl", "tcp")
    assert choice.names == ("tcp",)
    assert choice.reasons == (
        "shm: no memfd",
        "local: the peer does not offer it",
        "nixl: NIXL is not installed",
        "tcp: chosen, first in the order of preference that works",
    )
    assert peer.reasons == choice.reasons


def test_refusals_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "llm_datadist.link"):
        Scene(refusals={"nixl": "no device"}).run("nixl", "tcp")
        Scene().run("nixl", "tcp")
    (line,) = caplog.messages
    assert "cluster 9 is read by tcp" in line and "nixl: no device" in line


@pytest.mark.parametrize(
    ("offers", "refused", "beside"),
    [
        (("local", WORDS), "", True),
        (("shm", "local", WORDS), "", False),  # the way itself
        (("tcp", WORDS), "", None),  # from another host
        (("nixl", "tcp", WORDS), "", None),
        (("local",), "", None),
        (("local", WORDS), "shm", None),
    ],
)
def test_words_are_read_in_a_mapping_beside_a_way_of_this_host(
    offers: tuple[str, ...], refused: str, beside: bool | None
) -> None:
    scene = Scene(refusals={refused: "no"} if refused else {})
    _, peer = scene.run(*offers)
    if beside is None:
        assert peer.words is None
    elif beside:
        assert peer.words is scene.opened["shm"].channels[-1]
        assert scene.log[-1] == "shm WORDS"
    else:
        assert peer.words is peer.ways[0].channel
