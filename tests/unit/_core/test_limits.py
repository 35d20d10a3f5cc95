"""Row G17: the table of limits, the page that shows it, and what counts against them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._core.budget import Budget
from llm_datadist._core.layout import Layout
from llm_datadist._core.leases import Leases
from llm_datadist._core.line_counts import ALL, OTHERS, Left, LineCounts
from llm_datadist._core.notices import NoticeQueue
from llm_datadist._core.registry import GenerationWord, KeyName, Record, Registry
from llm_datadist._core.remote_table import RemoteCache, RemoteTable
from llm_datadist._core.share import Share
from llm_datadist.caches import CacheDesc
from llm_datadist.clusters import Notify
from llm_datadist.data_type import DataType
from llm_datadist.status import OutOfMemoryError, ParamInvalidError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "limits.md"
WORD = GenerationWord(0, 1)


def shown(value: float) -> str:
    """As a person reads it."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if isinstance(value, int) and value >= 64 << 10 and not value % (1 << shift):
            return f"{value >> shift} {unit}"
    return f"{value:,g}" if value < 10**6 else f"{value:,}"


def row(name: str, limit: limits.Limit) -> str:
    value = shown(limit.value) if "NBYTES" in name else f"{limit.value:,}"
    return f"| `{name}` | {limit.per} | {value} | {limit.why} |"


def test_g17_the_page_shows_the_table() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert lines == [row(name, limit) for name, limit in limits.TABLE.items()]


def test_g17_each_limit_has_the_name_of_its_value() -> None:
    assert all(getattr(limits, name) == limit.value for name, limit in limits.TABLE.items())


def test_a_budget_counts_by_link_and_for_all() -> None:
    budget = Budget(10, 15)
    assert budget.take(b"a", 10) and not budget.take(b"a", 1)
    assert budget.take(b"b", 5) and not budget.take(b"b", 1), "all together have no more"
    budget.give(b"a", 4)
    assert budget.take(b"b", 4) and budget.taken == 15
    budget.forget(b"b")
    budget.give(b"b", 9)
    assert budget.taken == 6


def test_a_share_is_a_burst_and_then_a_part_of_the_time() -> None:
    share = Share(1.0, 0.25, 100.0)
    share.spend(1.0)
    assert share.rest_s(100.0) == 0
    share.spend(0.5)
    assert share.rest_s(100.0) == 2.0 and share.rest_s(101.0) == 1.0 and share.rest_s(102.0) == 0
    assert share.rest_s(1000.0) == 0
    share.spend(1.25)
    assert share.rest_s(1000.0) == 1.0, "no more than a burst is saved up"


def test_g15_lines_are_counted_by_address() -> None:
    counts = LineCounts(addresses=2)
    said = [counts.admit("a", "lines", 2, f"text {n}", 0.0) for n in range(5)]
    assert said == [True, True, False, False, False]
    assert counts.admit("b", "lines", 2, "x", 1.0)
    others = [counts.admit(address, "lines", 1, address, 2.0) for address in ("c", "d", "e")]
    assert others == [True, False, False], "they share one count"
    assert counts.ended(59.0) == [] and counts.next_end == 60.0
    assert counts.ended(60.0) == [Left("a", "lines", 3, "text 4")]
    assert counts.ended(62.0) == [Left(OTHERS, "lines", 2, "e")] and counts.next_end is None


@pytest.mark.rule("S.26")
def test_g18_lines_about_all_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses there are; what tells of them later counts as well, and of the rest there is one line."""
    monkeypatch.setattr(limits, "LINES_ENGINE", 10)
    counts = LineCounts()
    said = [
        counts.admit(f"a{host}", "lines", 3, f"{host}.{n}", 1.0 + 0.01 * host)
        for host in range(20)
        for n in range(4)
    ]
    assert sum(said) == 10
    assert counts.admit("a0", "events", 3, "x", 2.0), "another kind has its own"
    left = counts.ended(70.0)
    assert [x.address for x in left] == [ALL]
    assert sum(x.more for x in left) == 80 - 10 and left[-1].last
    assert counts.next_end is None
    assert counts.admit("a0", "lines", 3, "x", 70.0), "a new minute"


def test_g18_what_was_counted_is_told_by_address_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINES_ENGINE", 4)
    counts = LineCounts()
    for host in range(3):
        for n in range(2):
            counts.admit(f"a{host}", "refused links", 1, f"{host}.{n}", 1.0)
    assert counts.ended(30.0) == []
    assert [(x.address, x.more) for x in counts.ended(61.0)] == [("a0", 1), ("a1", 1), ("a2", 1)]


def test_a_minute_without_a_line_too_many_ends_by_itself() -> None:
    counts = LineCounts()
    assert counts.admit("a", "lines", 1, "x", 1.0)
    assert counts.admit("a", "lines", 1, "x", 1.0 + limits.LINES_S), "nobody has asked what was left out"


def notify(cluster_id: int) -> Notify:
    return Notify(cluster_id, "n", b"")


def test_g18_a_peer_of_several_holds_as_many_notifications_as_are_free() -> None:
    queue = NoticeQueue(capacity=8)
    for ticket in range(4):
        queue.park(ticket, notify(1), alone=False)
    with pytest.raises(OutOfMemoryError, match=r"4 of them of cluster 1.*get_notifies"):
        queue.park(4, notify(1), alone=False)
    queue.park(5, notify(2), alone=False)
    queue.park(6, notify(2), alone=False)
    with pytest.raises(OutOfMemoryError, match="2 of them of cluster 2"):
        queue.park(7, notify(2), alone=False)
    queue.park(8, notify(3), alone=False)
    queue.withdraw(0)
    for ticket in (1, 2, 3, 5, 6, 8):
        queue.admit(ticket)
    assert len(queue.take()) == 6
    for ticket in range(4):
        queue.park(ticket, notify(1), alone=False)


def cache(cache_id: int, keys: int) -> RemoteCache:
    names = tuple((KeyName("req", 1000 * cache_id + n, 0), n) for n in range(keys))
    return RemoteCache(cache_id, Layout(1, keys, 8), False, WORD, np.zeros(1, np.uint64), names)


def test_g17_what_a_table_has_no_room_for_is_left_out() -> None:
    table = RemoteTable()
    table.put(cache(1, 100))
    full = table.nbytes
    table.put(cache(2, 1), most_nbytes=full)
    assert table.find(KeyName("cache", 2, 0)) is None and table.nbytes == full
    moved = RemoteCache(
        2, Layout(1, 1, 8), False, WORD, np.zeros(1, np.uint64), ((KeyName("req", 1000, 0), 0),)
    )
    table.put(moved, most_nbytes=full)
    assert table.find(KeyName("req", 1000, 0)) is None, "it is not cache 1's any more: its owner is asked"
    table.put(cache(1, 10), most_nbytes=full)
    assert table.nbytes < full
    table.drop(1)
    assert table.nbytes == 0


def record(cache_id: int, addresses: list[int], dim0: int, stride: int) -> Record:
    desc = CacheDesc(len(addresses), [dim0, stride], DataType.DT_UINT8)
    layout = Layout(len(addresses), dim0, stride)
    return Record(cache_id, desc, layout, np.array(addresses, np.uint64), True, True, WORD, ())


def test_g17_leases_of_a_peer_have_a_limit_and_ours_do_not_count() -> None:
    leases = Leases(lambda: WORD, lambda word: None)
    mine = record(1, [4096], 1, 8)
    given = [leases.grant(b"a", mine, 10.0) for _ in range(3)]
    leases.grant(b"b", mine, float("inf"))
    leases.check_room(b"b", 1)
    with pytest.raises(OutOfMemoryError, match="3 reads"):
        leases.check_room(b"a", 3)
    leases.end(given[0])
    leases.check_room(b"a", 3)
    leases.expire(10.0)
    assert leases.of_holder(b"a") == [] and len(leases.of_cache(1)) == 1


def test_g17_leases_cost_the_same_however_many_there_are() -> None:
    leases = Leases(lambda: WORD, lambda word: None)
    mine = record(1, [4096], 1, 8)
    began = time.thread_time()
    for number in range(20_000):
        leases.expire(0.0)
        leases.end(leases.grant(b"x", mine, 1.0 + number)) if number % 2 else leases.grant(b"a", mine, 10.0)
        leases.check_room(b"a", 1 << 20)
    assert time.thread_time() - began < 2.0, "it took minutes when each looked at all"


# ---- pushes to raw addresses ---------------------------------------------------------------------------------------


def opened(*caches: tuple[list[int], int, int]) -> Registry:
    registry = Registry()
    for addresses, dim0, stride in caches:
        one = record(0, addresses, dim0, stride)
        registry.add(
            one.desc, one.layout, one.addresses, (), is_blocks=True, remote_accessible=True, word=WORD
        )
    return registry


@pytest.mark.rule("S.23")
def test_g17_equal_bases_times_many_blocks_are_looked_up_once() -> None:
    """100,000 x 400,000, half of the blocks in another cache: minutes, under the lock, when each base had its look."""
    per_cache, stride = 200_000, 64
    far = 1 << 30
    registry = opened(([1 << 20], per_cache, stride), ([(1 << 20) + far], per_cache, stride))
    near = np.arange(per_cache, dtype=np.uint64) * np.uint64(stride)
    offsets = np.concatenate((near, near + np.uint64(far)))
    bases = np.full(100_000, 1 << 20, np.uint64)
    began = time.thread_time()
    owners = registry.open_memory().owners_of(bases, offsets, np.full(len(offsets), stride, np.uint64))
    assert time.thread_time() - began < 2.0
    assert [owner.cache_id for owner in owners] == [1, 2]


def test_g17_different_bases_with_too_many_ends_between_their_blocks_are_refused() -> None:
    count = 4096
    registry = opened(([4096 + 128 * n for n in range(count)], 1, 64))
    bases = np.arange(4096, 4096 + 128 * 512, 128, dtype=np.uint64)
    offsets = np.array([0, 128 * (count - 600)], np.uint64)
    memory = registry.open_memory()
    lengths = np.full(2, 64, np.uint64)
    with pytest.raises(ParamInvalidError, match="push it in parts"):
        memory.owners_of(bases, offsets, lengths)
    assert len(memory.owners_of(bases[:4], offsets, lengths)) == 1


def test_a_look_at_the_registry_stays_what_it_was() -> None:
    registry = opened(([4096], 4, 64))
    before = registry.open_memory()
    assert registry.open_memory() is before, "nothing has changed"
    registry.remove(1)
    one = np.array([4096], np.uint64), np.zeros(1, np.uint64), np.array([64], np.uint64)
    assert len(before.owners_of(*one)) == 1
    with pytest.raises(ParamInvalidError):
        registry.open_memory().owners_of(*one)
