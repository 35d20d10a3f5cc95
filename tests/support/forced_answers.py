"""Reasons not to use ``shm`` that a reader learns from the owner's answer, after the handshake."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist._core import limits
from llm_datadist.devices.shared_memory import create_memfd, seal
from llm_datadist.transports import shm_memory, shm_owner
from tests.support.engines import Engines
from tests.support.pair import SUCCESS
from tests.support.reasons import Stage, forces

NOT_IN_USE = "shm: not in use: "
FAILED = LLMStatusCode.LLM_LINK_FAILED


def _pull_fails(
    prepare: Callable[[Any], object],
    then: Callable[[], object] = lambda: None,
    code: LLMStatusCode = FAILED,
) -> str:
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
        assert caught.value.status_code == code
        assert (memory == 0xA5).all()
        (info,) = reader.links()
        (told,) = (r.removeprefix(NOT_IN_USE) for r in info.reasons if r.startswith(NOT_IN_USE))
        assert told in str(caught.value), f"{told!r} is not in {caught.value}"
        return told


def _replace(giver: Any, make: Callable[[int], int]) -> None:
    """Other descriptors in the place of the first."""
    fd = make(giver._descriptors[0])
    giver._descriptors = [fd, *giver._descriptors[1:]]


@forces("the peer refused: {}")
@forces(
    "what this process shows is not the proof of a handshake that is under way here: the link is another process's, "
    "or it was shown before"
)
def another_handshake(stage: Stage) -> str:
    return _pull_fails(lambda giver: setattr(giver, "expect", lambda proof: None))


@forces("the owner of the memory has {} readers, which is the most")
def too_many(stage: Stage) -> str:
    stage.patch.setattr(limits, "READERS", 0)
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


@forces("the owner of the memory cannot watch another connection: {}")
def cannot_watch(stage: Stage) -> str:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _pull_fails(lambda giver: setattr(giver, "_adopt_reader", fail))


@forces("no local socket can be opened: {}")
def no_socket(stage: Stage) -> str:
    begin = socket.socket.__init__

    def fail(sock: socket.socket, family: int = -1, *args: Any, **named: Any) -> None:
        if family == socket.AF_UNIX:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        begin(sock, family, *args, **named)

    return _pull_fails(lambda giver: stage.patch.setattr(socket.socket, "__init__", fail))


@forces("the peer closed the connection without an answer")
def no_answer(stage: Stage) -> str:
    stage.patch.setattr(shm_owner.Giver, "welcome", lambda _, sock: sock.close())
    return _pull_fails(lambda giver: None)


@forces("the peer has not sent its memory yet: it is stopped, or too busy to answer")
def late_answer(stage: Stage) -> str:
    held: list[Any] = []
    stage.patch.setattr(shm_owner.Giver, "welcome", lambda _, sock: held.append(sock))
    try:
        return _pull_fails(lambda giver: None, code=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    finally:
        for sock in held:
            sock.close()


@forces("the connection to the peer's memory broke")
def broken(stage: Stage) -> str:
    def fail(_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stage.patch.setattr(shm_memory.PeerMemory, "_look", fail)
    return _pull_fails(lambda giver: None)


@forces("the peer sent {} areas of {}; refused")
def too_few(stage: Stage) -> str:
    return _pull_fails(lambda giver: setattr(giver, "_descriptors", giver._descriptors[:-1]))


@forces("the peer's memory cannot be mapped")
def no_room(stage: Stage) -> str:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    stage.patch.setattr(shm_memory, "map_memory", fail)
    return _pull_fails(lambda giver: None, code=LLMStatusCode.LLM_OUT_OF_MEMORY)


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
