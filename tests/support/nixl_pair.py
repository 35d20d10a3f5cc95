"""Pairs for transport ``nixl``: an owner process with a ``NixlTransport``, and a reader."""

from __future__ import annotations

import base64
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Extents
from llm_datadist.testing.owner import Memory, OwnerProcess, serve
from llm_datadist.transports import _nixl
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_channel import NixlChannel
from llm_datadist.transports.seam import PeerEndpoint, Region, TransportUnavailable
from tests.support.local_pair import PROOF

OPEN_S = 30.0
SLAB_NBYTES = 4096


def need_nixl() -> None:
    """Skips the test, with the reason, where NIXL is not installed."""
    try:
        _nixl.agents()
    except TransportUnavailable as exc:
        pytest.skip(str(exc))


def environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """For processes that answer on standard output, where UCX would write what goes wrong."""
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, "UCX_LOG_FILE": "stderr", **(env or {})}


def transport(linger_s: float = 0.3) -> NixlTransport:
    return NixlTransport(secrets.token_bytes, linger_s)


def endpoint(blob: bytes) -> PeerEndpoint:
    return PeerEndpoint(1, blob, b"", None, lambda count: None, PROOF, within_host=True)


def region(*bases: int, nbytes: int) -> Region:
    return Region(np.array(bases, dtype=np.uint64), nbytes)


class OwnerMemory(Memory):
    """Memory of the owner, registered when it is mapped; what was told is read with ``told``."""

    def __init__(self, owner: NixlTransport) -> None:
        super().__init__()
        self._owner = owner
        self._tokens: dict[int, tuple[int, bytes]] = {}
        # Mapped first and for good: an address that was registered once is in the readers' tokens.
        self._beyond = super().map_sparse(1 << 20)

    def map_sparse(self, nbytes: int) -> int:
        address = super().map_sparse(nbytes)
        self.register(address, max(1, nbytes))
        return address

    def register(self, address: int, nbytes: int) -> str:
        token = self._owner.register(region(address, nbytes=nbytes))
        self._tokens[address] = nbytes, token
        return base64.b64encode(token).decode()

    def unregister(self, address: int) -> None:
        self._owner.unregister(self._tokens.pop(address)[1])

    def unmap(self, address: int, nbytes: int) -> None:
        if self._tokens.get(address, (-1, b""))[0] in (nbytes, max(1, nbytes)):
            self.unregister(address)
        super().unmap(address, nbytes)

    def tokens(self, addresses: Sequence[int]) -> list[str]:
        return [base64.b64encode(self._tokens[a][1]).decode() for a in addresses]

    def beyond(self) -> int:
        """Memory that was never registered."""
        return self._beyond


class NixlOwner(OwnerProcess):
    """An owner process that can be read with ``nixl``."""

    def __init__(self, argv: Sequence[str] | None = None, env: dict[str, str] | None = None) -> None:
        path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        super().__init__([*(argv or []), sys.executable, __file__], env={**os.environ, **path, **(env or {})})
        try:
            self.endpoint = endpoint(base64.b64decode(self.call("endpoint")))
        except BaseException:
            OwnerProcess.close(self)
            raise

    def source(self, extents: Extents) -> Extents:
        return extents

    def token(self, address: int) -> bytes:
        return base64.b64decode(self.call("tokens", addresses=[address])[0])

    def register(self, address: int, nbytes: int) -> bytes:
        return base64.b64decode(self.call("register", address=address, nbytes=nbytes))

    def beyond(self) -> int:
        return int(self.call("beyond"))


class NixlPair(NixlOwner):
    """A ``testing.one_sided.PartialPair``, whose reader hears of all that the owner registers."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = transport()
        self.channel: NixlChannel = self.reader.open(self.endpoint, deadline=time.monotonic() + OPEN_S)

    def allocate(self, sizes: Sequence[int], seed: int) -> list[int]:
        return self._admitted(super().allocate(sizes, seed))

    def map_sparse(self, nbytes: int) -> int:
        return self._admitted([super().map_sparse(nbytes)])[0]

    def register_destination(self, address: int, nbytes: int) -> Callable[[], None]:
        token = self.reader.register(region(address, nbytes=nbytes))
        return lambda: self.reader.unregister(token)

    def close(self) -> None:
        self.reader.close()
        super().close()

    def _admitted(self, addresses: list[int]) -> list[int]:
        for token in self.call("tokens", addresses=addresses):
            self.channel.admit(base64.b64decode(token))
        return addresses


def _main() -> None:
    owner = transport()
    memory = OwnerMemory(owner)
    handlers: dict[str, Callable[..., Any]] = {
        "endpoint": lambda: base64.b64encode(owner.endpoint(PROOF)).decode(),
        "write": lambda address, data: memory.write(address, bytes.fromhex(data)),
    }
    for name in ("allocate", "map_sparse", "unmap", "tokens", "register", "unregister", "beyond"):
        handlers[name] = getattr(memory, name)
    serve(handlers)


if __name__ == "__main__":
    _main()
