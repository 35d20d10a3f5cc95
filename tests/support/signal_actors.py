"""A process that makes all calls of an engine while it gets SIGINT again and again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

import llm_datadist as dd
from tests.support import actors
from tests.support.memory import FILL
from tests.support.world import World

PAUSE_S = 0.05  # 20 a second


class Caller:
    """All calls of one process, one after the other, interrupted or not."""

    def __init__(self, dist: dd.LLMDataDist, mode: str, other: Any, address: tuple[str, int]) -> None:
        self.dist, self.mode, self.address = dist, mode, address
        self.manager = dist.cache_manager
        self.cache, self.memory, self.spare = other
        self.seen: Counter[str] = Counter()

    def calls(self) -> dict[str, Any]:
        key = dd.BlocksCacheKey(1, 0)
        calls = {
            "link": self.link,
            "pull": lambda: self.manager.pull_blocks(key, self.cache, [1, 3], [1, 3]),
            "one": lambda: self.manager.pull_blocks(key, self.cache, [1], [1]),
            "async": lambda: self.manager.pull_blocks_async(key, self.cache, [1], [1]).synchronize(5000),
            "notify": lambda: self.dist.send_notify(1, "name", b"x"),
            "copy": lambda: self.manager.copy_blocks(self.cache, {0: [2]}),
            "check": lambda: self.dist.check_link_status(1),
            "register": self.register,
            "allocate": self.allocate,
            "push": lambda: self.manager.push_blocks(key, self.cache, [0], [2]),
            "unlink": lambda: self.dist.unlink_clusters([actors.cluster(1)], 3000),
        }
        if self.mode == "A":
            del calls["push"]
        return calls

    def link(self) -> None:
        self.dist.link_clusters([actors.cluster(1, self.address)], 3000)

    def register(self) -> None:
        desc = dd.CacheDesc(4, [4, 64], dd.DataType.DT_UINT8)
        cache = self.manager.register_blocks_cache(
            desc, [t.ctypes.data for t in self.spare], dd.BlocksCacheKey(2, 9)
        )
        self.manager.unregister_cache(cache.cache_id)

    def allocate(self) -> None:
        desc = dd.CacheDesc(2, [2, 1000], dd.DataType.DT_UINT8)
        cache = self.manager.allocate_cache(desc, [dd.CacheKey(2, 5, 0)])
        try:
            starts = [
                a for info in self.manager.caches() if info.allocated for a in self.starts(info.cache_id)
            ]
            assert len(set(starts)) == len(starts), "two caches have the same pages"
        finally:
            self.manager.unregister_cache(cache.cache_id)

    def starts(self, cache_id: int) -> list[int]:
        record = self.dist._engine._state.registry.get(cache_id)  # type: ignore[union-attr]
        return [] if record is None else record.addresses.tolist()

    def clear(self) -> None:
        """What an interrupt between two calls left, which is this caller's to give back."""
        for info in self.manager.caches():
            if info.cache_id != self.cache.cache_id:
                self.manager.unregister_cache(info.cache_id)

    def go_on(self, seconds: float) -> None:
        """Makes all calls until the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, call in self.calls().items():
                try:
                    call()
                    self.seen[name] += 1
                except KeyboardInterrupt:
                    self.seen["interrupts"] += 1
                except dd.LLMException as exc:  # what an interrupted call before left undone, as a link
                    if exc.status_code not in (
                        dd.LLMStatusCode.LLM_NOT_YET_LINK,
                        dd.LLMStatusCode.LLM_PARAM_INVALID,
                    ):
                        raise


def interrupted_for(w: World, mode: str, address: tuple[str, int], seconds: float) -> dict[str, int]:
    """Makes all calls under interrupts, then without; what was counted."""
    caller = Caller(w.dist, mode, (w.extras["cache"], w.extras["memory"], w.extras["spare"]), address)
    over = threading.Event()
    armed = False

    def on_signal(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    def strike() -> None:
        while not over.wait(PAUSE_S):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, on_signal)
    striking = threading.Thread(target=strike)
    striking.start()
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            try:
                armed = True
                caller.go_on(until - time.monotonic())
                armed = False
            except KeyboardInterrupt:
                armed = False
                caller.seen["between"] += 1
    finally:
        armed = False
        over.set()
        striking.join()
        signal.signal(signal.SIGINT, before)
    caller.clear()
    caller.link()
    for name, call in caller.calls().items():
        call()
        caller.seen[f"{name} at the end"] += 1
    assert w.dist.cache_manager.pool_info(dd.Placement.DEVICE).allocations == 0
    return dict(caller.seen)


def prepare(w: World) -> None:
    memory, spare = np.full((4, 4, 64), FILL, "u1"), np.full((4, 4, 64), FILL, "u1")
    desc = dd.CacheDesc(4, [4, 64], dd.DataType.DT_UINT8)
    w.extras["memory"], w.extras["spare"] = memory, spare
    w.extras["cache"] = w.dist.cache_manager.register_blocks_cache(
        desc, [t.ctypes.data for t in memory], dd.BlocksCacheKey(w.dist.cluster_id, 0)
    )


def take_notifies(w: World, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        w.dist.get_notifies()
        time.sleep(PAUSE_S)
