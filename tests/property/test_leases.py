"""Leases against a dict model: who holds what until when, and every word cleared exactly once."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist._core.layout import Layout
from llm_datadist._core.leases import Lease, Leases
from llm_datadist._core.registry import GenerationWord, Record
from llm_datadist.caches import CacheDesc
from llm_datadist.data_type import DataType

HOLDERS = [b"a", b"b"]
DESC = CacheDesc(1, [1, 8], DataType.DT_INT8)
RECORDS = [
    Record(i, DESC, Layout(1, 1, 8), np.array([64], np.uint64), False, True, GenerationWord(8, 1), ())
    for i in (1, 2)
]


class LeasesMachine(RuleBasedStateMachine):
    """Model: the leases that are out, in a dict of our own, under a clock of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.values = itertools.count(1)
        self.live: set[int] = set()
        self.leases = Leases(self.new_word, self.clear_word)
        self.out: dict[int, Lease] = {}
        self.ended: list[Lease] = []
        self.now = 0.0

    def new_word(self) -> GenerationWord:
        word = GenerationWord(0, next(self.values))
        self.live.add(word.value)
        return word

    def clear_word(self, word: GenerationWord) -> None:
        self.live.remove(word.value)  # KeyError: cleared twice

    @rule(
        holder=st.sampled_from(HOLDERS),
        record=st.sampled_from(RECORDS),
        left=st.sampled_from([0.0, 1, 3, float("inf")]),
    )
    def grant(self, holder: bytes, record: Record, left: float) -> None:
        lease = self.leases.grant(holder, record, self.now + left)
        assert (lease.holder, lease.record, lease.expires_at) == (holder, record, self.now + left)
        assert lease.lease_id not in self.out | {x.lease_id: x for x in self.ended}
        assert lease.lease_id > 0  # 0 stands for "no lease" on the wire
        self.out[lease.lease_id] = lease

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.sampled_from(sorted(self.out))))
        assert self.leases.end(lease)
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule()
    def end_again(self) -> None:
        assert not self.leases.end(self.ended[-1])

    @rule(step=st.sampled_from([0.0, 1.0, 2.5]))
    def time_goes_on(self, step: float) -> None:
        self.now += step
        for lease in self.out.values():  # one whose time is over is nobody's, also before it is swept out
            wanted = lease if self.now < lease.expires_at else None
            assert self.leases.get(lease.lease_id, lease.holder, self.now) is wanted
        self.leases.expire(self.now)
        over = [x for x in self.out.values() if x.expires_at <= self.now]
        self.ended += over
        for lease in over:
            del self.out[lease.lease_id]

    @invariant()
    def same_as_the_model(self) -> None:
        assert self.live == {x.word.value for x in self.out.values()}
        for holder in HOLDERS:
            assert set(self.leases.of_holder(holder)) == {x for x in self.out.values() if x.holder == holder}
            for lease_id in range(len(self.out) + len(self.ended) + 2):
                lease = self.out.get(lease_id)
                mine = lease is not None and lease.holder == holder and self.now < lease.expires_at
                assert self.leases.get(lease_id, holder, self.now) is (lease if mine else None)
        for record in RECORDS:
            assert set(self.leases.of_cache(record.cache_id)) == {
                x for x in self.out.values() if x.record is record
            }


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=50, stateful_step_count=20)
