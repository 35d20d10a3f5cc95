"""What a proof is made of: it holds for one connection, in one direction. Pure.

Each side sends a fresh challenge. Who is to show that it can be reached some way, puts the proof where only
its own process can: a hash of that challenge and of its view of the connection, both ends. The other side
computes the same from its own view, the mirror. A challenge alone could be passed on: a client may link to
another process, hand it the challenge as its own, and show what that one has put there. But that one sees
another connection; and within a network namespace, where processes meet, no two sockets have the same ends.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Any

import msgspec

from llm_datadist._core import limits

CHALLENGE_NBYTES = (16, limits.SECRET_NBYTES)  # long enough not to be guessed, bounded
PROOF_NBYTES = 32


class Ends(msgspec.Struct, frozen=True):
    """A connection as one side of it sees it. Two sides of one connection have mirrored ones."""

    mine: bytes
    peers: bytes

    def mirrored(self) -> Ends:
        """As the other side sees it."""
        return Ends(self.peers, self.mine)

    @property
    def is_within_host(self) -> bool:
        """Whether both are of this host: no packet comes from another one with our own address as its sender."""
        mine, peers = (end.rpartition(b" ")[0] for end in (self.mine, self.peers))
        return mine == peers or (mine.startswith(b"127.") and peers.startswith(b"127."))


def end_of(name: tuple[Any, ...]) -> bytes:
    """One end: what ``getsockname`` or ``getpeername`` gives, in the form that it has in every family.

    A link-local address counts with its interface: each has such addresses of its own.
    """
    host, port = str(name[0]), int(name[1])
    scope = int(name[3]) if len(name) > 3 else 0
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address, scope = address.ipv4_mapped, 0
    return f"{address}%{scope} {port}".encode()


def proof_of(challenge: bytes, ends: Ends) -> bytes:
    """What the side shows that sees these ends, and was sent this challenge."""
    return _digest(b"proof", challenge, ends.mine, ends.peers)


def secret_of(seed: bytes, dialler: bytes, dialled: bytes) -> bytes:
    """The secret of a link, to which both sides have given something new: neither can make it that of another.

    Args:
        seed: Of the dialled side, in its Welcome.
        dialler: The dialler's challenge.
        dialled: The dialled side's challenge.
    """
    return _digest(b"link", seed, dialler, dialled)


def _digest(*parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.sha256(b"llm-datadist" + framed).digest()
