"""Our copy of a peer's table against a dict model: what is announced is found, what is withdrawn is not."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, KeyName
from llm_datadist._core.remote_table import RemoteCache, RemoteTable

NAMES = [KeyName("req", 1, 0), KeyName("req", 1, 1), KeyName("prefix", 1, 0), KeyName("blocks", 0, 0)]
IDS = range(1, 4)


class TableMachine(RuleBasedStateMachine):
    """Model: cache id -> the last announcement, key name -> (cache id, batch, word) of the last that had it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RemoteTable()
        self.caches: dict[int, RemoteCache] = {}
        self.bound: dict[KeyName, tuple[int, int, GenerationWord]] = {}
        self.made = 100

    @rule(
        cache_id=st.sampled_from(IDS),
        keys=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)),
        more_keys=st.booleans(),
    )
    def announce(self, cache_id: int, keys: dict[KeyName, int], more_keys: bool) -> None:
        words = {}
        for name in keys:
            self.made += 1
            words[name] = GenerationWord(16, self.made)
        word = GenerationWord(8, cache_id)
        cache = RemoteCache(
            cache_id, Layout(1, 4, 4), False, word, np.empty(0, np.uint64), tuple(keys.items()), words
        )
        version = self.table.version
        self.table.put(cache, more_keys=more_keys)
        assert self.table.version > version
        if not more_keys:
            self.forget(cache_id)
        self.caches[cache_id] = cache
        self.bound.update({name: (cache_id, batch, words[name]) for name, batch in keys.items()})

    @rule(cache_id=st.sampled_from(IDS))
    def withdraw(self, cache_id: int) -> None:
        version = self.table.version
        self.table.drop(cache_id)
        assert self.table.version > version
        self.forget(cache_id)

    def forget(self, cache_id: int) -> None:
        self.caches.pop(cache_id, None)
        self.bound = {name: at for name, at in self.bound.items() if at[0] != cache_id}

    @invariant()
    def finds_what_the_model_finds(self) -> None:
        for cache_id in IDS:
            found = self.table.find(KeyName("cache", cache_id, 0))
            assert (found and found[0]) is self.caches.get(cache_id)
            assert found is None or found[1:] == (0, GenerationWord(8, cache_id))
        for name in NAMES:
            found = self.table.find(name)
            at = self.bound.get(name)
            assert found == (None if at is None else (self.caches[at[0]], at[1], at[2]))


TestRemoteTable = TableMachine.TestCase
TestRemoteTable.settings = settings(max_examples=50, stateful_step_count=20)
