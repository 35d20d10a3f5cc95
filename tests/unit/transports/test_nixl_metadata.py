"""What NIXL is given to parse: its own form, of one agent, with what was told beside it; nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist._core.segments import U64
from llm_datadist.transports.nixl_metadata import BadMetadata, check
from tests.support.fake_nixl import written

ROWS = [[4096, 8192], [8192, 8292], [1 << 40, (1 << 40) + 1]]
KEYS = [1, 2, 3]
ADDRESS = b"an address of UCX"
# Of NIXL 1.5.1, host memory, over TCP.
SAMPLE = bytes.fromhex(
    "6e69786c5365724465737c4167656e7404000000000000006162" "63647c436f6e6e7308000000000000000000000000000000"
    "7c0a000000000000004d656d53656374696f6e7c6e69786c536563456c6d7308000000000000000100000000000000"
    "7c626b6e6403000000000000005543587c6e69786c444c6973740a000000000000006e69786c53444c6973747c74"
    "0400000000000000000000007c6e080000000000000001000000000000007c2100000000000000"
    "0010000000000000002000000000000000000000000000000000000000000000007c"
)  # fmt: skip


def rows(pairs: object = ROWS) -> U64:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def made(connection: bool = False, memory: str = "host") -> bytes:
    return written("agent", memory, ROWS, KEYS, connection)


def refused(
    metadata: bytes,
    *,
    agent: str = "agent",
    memory: str = "host",
    told: object = ROWS,
    connection: bool = False,
) -> str:
    with pytest.raises(BadMetadata) as why:
        check(metadata, agent, memory, rows(told), connection)
    return str(why.value)


def test_what_nixl_writes_is_good() -> None:
    check(SAMPLE, "abcd", "host", rows([[4096, 12288]]), connection=False)
    for connection in (False, True):
        check(made(connection), "agent", "host", rows(), connection)
    check(made(memory="cuda:2"), "agent", "cuda:2", rows(), connection=False)
    check(made(memory="cuda:0"), "agent", "cuda", rows(), connection=False)


def test_keys_may_differ_in_size() -> None:
    longer = made().removesuffix(b"|")[:-8] + b"k" * 30 + b"|"
    at = longer.rindex((32).to_bytes(8, "little"))
    check(
        longer[:at] + (54).to_bytes(8, "little") + longer[at + 8 :], "agent", "host", rows(), connection=False
    )


def test_a_range_of_another_size_is_whole() -> None:
    """Together they are as long as they ought to be."""
    begin = written("agent", "host", ROWS[:2], KEYS[:2], False)[: -2 * 41]
    short, long = ((n).to_bytes(8, "little") + bytes(n) + b"|" for n in (16, 48))
    assert "end otherwise" in refused(begin + short + long, told=ROWS[:2])


def test_ranges_may_come_in_any_order() -> None:
    metadata = written("agent", "host", ROWS[::-1], KEYS, False)
    check(metadata, "agent", "host", rows(), connection=False)


@pytest.mark.rule("S.40")
@pytest.mark.parametrize("connection", [False, True])
def test_g16_nothing_that_was_cut_or_changed_comes_to_nixl(connection: bool) -> None:
    """But addresses of UCX and keys, which only UCX can read."""
    metadata = made(connection)
    opaque = {metadata.find(ADDRESS) + i for i in range(len(ADDRESS))} if connection else set()
    for key in KEYS:
        at = metadata.rindex(key.to_bytes(8, "little") + b"|")
        opaque |= set(range(at, at + 8))
    for at in range(len(metadata)):
        refused(metadata[:at], connection=connection)
        refused(metadata[:at] + metadata[at + 1 :], connection=connection)
        for bits in (0x01, 0x80, 0xFF):
            changed = metadata[:at] + bytes([metadata[at] ^ bits]) + metadata[at + 1 :]
            if at not in opaque:
                refused(changed, connection=connection)
    refused(metadata + b"|", connection=connection)
    refused(metadata + metadata, connection=connection)
    refused(b"", connection=connection)


@pytest.mark.rule("S.40")
def test_g16_what_was_told_beside_it_is_what_it_says() -> None:
    assert "in the name of" in refused(made(), agent="another")
    assert "other ranges" in refused(made(), told=[*ROWS[:2], [1 << 40, (1 << 40) + 2]])
    refused(made(), told=ROWS[:2])
    refused(made(), told=[])
    refused(made(), memory="cuda:1")
    assert "another device" in refused(made(memory="cuda:2"), memory="cuda:1")
    assert "without the one connection" in refused(made(False), connection=True)
    assert "with a connection" in refused(made(True), connection=False)


@pytest.mark.parametrize("row", [[4096, 4096], [(1 << 64) - 8, 8]], ids=["empty", "beyond the address space"])
def test_a_range_that_is_none_is_refused(row: list[int]) -> None:
    metadata = written("agent", "host", [[4096, 8192]], [1], False)
    start, nbytes = row[0], (row[1] - row[0]) % (1 << 64)
    old = (4096).to_bytes(8, "little") * 2
    changed = metadata.replace(old, start.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
    assert changed != metadata
    assert "other ranges" in refused(changed, told=[row])
