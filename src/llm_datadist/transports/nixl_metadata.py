"""What NIXL's metadata say, read before NIXL reads them (pure).

NIXL believes what it parses: a count that is too large makes it read beyond the end. And what a peer calls metadata
of its own may have any connection in them. So nothing is handed to NIXL but the form that NIXL itself writes, of
one agent and one kind of memory, with the ranges that were told beside it. What is within, addresses of UCX and
keys of memory, only UCX can read.

The form: ``nixlSerDes|``, then fields of a tag, a length (8 bytes, little-endian), that many bytes and ``|``.
"""

from __future__ import annotations

import numpy as np

from llm_datadist._core.segments import U64

_BEGIN = b"nixlSerDes|"
_BACKEND = b"UCX"
_KINDS = {"host": 0, "cuda": 1}  # of ``Region.memory``, without ":device"; as NIXL numbers them
_RANGE_NBYTES = 24  # address, length, device; then the key
_LENGTH = 8


class BadMetadata(Exception):  # noqa: N818 - an answer
    """These are no metadata that NIXL may see; the text says why."""


def check(metadata: bytes, agent: str, memory: str, rows: U64, connection: bool) -> None:
    """Whether they are of this agent, and say of its memory what was told beside them.

    Args:
        metadata: Of a peer.
        agent: Its name.
        memory: What kind of memory.
        rows: Sorted rows of (start, end).
        connection: Whether they say how to connect to it.

    Raises:
        BadMetadata: They are not, or in another form.
    """
    fields = _Fields(metadata)
    name = fields.take(b"Agent")
    if name != agent.encode():
        raise BadMetadata(f"metadata of agent {name[:64]!r} in the name of {agent!r}")
    if fields.take(b"Conns") != _number(connection):
        raise BadMetadata(
            "metadata without the one connection" if connection else "metadata with a connection"
        )
    if connection:
        fields.expect(b"t", _BACKEND)
        fields.take(b"c")
    kind, _, device = memory.partition(":")
    fields.expect(b"", b"MemSection")
    fields.expect(b"nixlSecElms", _number(1))
    fields.expect(b"bknd", _BACKEND)
    fields.expect(b"nixlDList", b"nixlSDList")
    fields.expect(b"t", _number(_KINDS[kind])[:4])
    fields.expect(b"n", _number(len(rows)))
    told = fields.ranges(len(rows))
    if (told[:, 2] != int(device or 0)).any():
        raise BadMetadata(f"metadata of another device than {memory!r}")
    told[:, 1] += told[:, 0]
    order = np.lexsort((told[:, 1], told[:, 0]))
    if not np.array_equal(told[order, :2], rows) or (rows[:, 1] <= rows[:, 0]).any():
        raise BadMetadata("metadata of other ranges than those that were told")


def _number(value: int) -> bytes:
    return value.to_bytes(_LENGTH, "little")


class _Fields:
    """The fields, one after the other."""

    def __init__(self, metadata: bytes) -> None:
        self._all = metadata
        self._at = 0
        self._skip(_BEGIN)

    def take(self, tag: bytes) -> bytes:
        """What is in the next field, which has this tag."""
        self._skip(tag)
        start = self._at + _LENGTH
        self._at = start + int.from_bytes(self._all[self._at : start], "little")
        found = self._all[start : self._at]
        self._skip(b"|")
        return found

    def expect(self, tag: bytes, content: bytes) -> None:
        """The next field is that."""
        if self.take(tag) != content:
            raise BadMetadata(f"metadata whose field {tag.decode()!r} is not {content!r}")

    def ranges(self, count: int) -> U64:
        """The other fields, all of them: rows of address, length and device."""
        rest = len(self._all) - self._at
        if not count or rest % count:
            return self._ranges_of_any_size(count)
        size = rest // count - _LENGTH - 1
        if size < _RANGE_NBYTES:
            raise BadMetadata(f"metadata with {rest} bytes for {count} ranges")
        head = np.frombuffer(_number(size), dtype=np.uint8)
        table = np.frombuffer(self._all, dtype=np.uint8, offset=self._at).reshape(count, -1)
        if (table[:, :_LENGTH] != head).any() or (table[:, -1] != ord("|")).any():
            return self._ranges_of_any_size(count)
        told: U64 = table[:, _LENGTH : _LENGTH + _RANGE_NBYTES].copy().view("<u8").astype(np.uint64)
        return told

    def _ranges_of_any_size(self, count: int) -> U64:
        """Keys may differ in size."""
        found = [self.take(b"") for _ in range(count)]
        if self._at != len(self._all) or any([len(one) < _RANGE_NBYTES for one in found]):
            raise BadMetadata(f"metadata that end otherwise than after {count} ranges")
        flat = b"".join([one[:_RANGE_NBYTES] for one in found])
        return np.frombuffer(flat, dtype="<u8").astype(np.uint64).reshape(-1, 3)

    def _skip(self, expected: bytes) -> None:
        stop = self._at + len(expected)
        if self._all[self._at : stop] != expected:
            raise BadMetadata(f"metadata with something else where {expected!r} is to be")
        self._at = stop
