"""What peers are told to do with notifications and background transfers; see ``actors``."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from llm_datadist import CacheTask
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support.world import World, wait_until


def send_notify(w: World, cluster_id: int, name: str, message: bytes) -> None:
    w.dist.send_notify(cluster_id, name, message)


def send_many(w: World, cluster_id: int, count: int) -> None:
    for number in range(count):
        w.dist.send_notify(cluster_id, f"n{number}", b"")


def get_notifies(w: World) -> list[tuple[int, str, bytes]]:
    return [(n.cluster_id, n.name, n.message) for n in w.dist.get_notifies()]


def await_notifies(w: World, count: int, timeout: float = 5.0) -> list[tuple[int, str, bytes]]:
    """Until so many have come."""
    found: list[tuple[int, str, bytes]] = []
    wait_until(lambda: len(found) >= count or found.extend(get_notifies(w)) or len(found) >= count, timeout)
    return found


def start(w: World, method: str, key: Any, name: str, *args: Any, task: str = "task", **more: Any) -> None:
    """Begins a background transfer and keeps its task."""
    w.extras[task] = getattr(w.dist.cache_manager, method)(key, w.held[name].cache, *args, **more)


def finish(w: World, timeout_ms: int = 10_000, task: str = "task") -> tuple[Any, Any, str]:
    """Its code, results and error text."""
    held: CacheTask = w.extras[task]
    code = held.synchronize(timeout_ms)
    return code, held.get_results(0), str(held.exception(0) or "") if held.done() else ""


def cancel(w: World, task: str = "task") -> tuple[bool, Taken]:
    """What ``cancel`` says, and how long it takes."""
    watch = Stopwatch()
    return w.extras[task].cancel(), watch.took()


def is_cut(w: World) -> bool:
    """Whether a call under way is told to end; waits for it."""
    state = w.dist._engine._state
    return wait_until(lambda: bool(state.flights.where(lambda flight: flight.error is not None)))


def many(w: World, method: str, key: Any, name: str, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Many at once; all their codes."""
    cache = w.held[name].cache
    tasks = [getattr(w.dist.cache_manager, method)(key, cache, *args) for args in calls]
    return [task.synchronize(20_000) for task in tasks]


def chained(w: World, method: str, key: Any, name: str, args: tuple[Any, ...], count: int) -> list[Any]:
    """Callbacks that each start a transfer of their own and wait for it, all at once."""
    cache, codes, left = w.held[name].cache, [], threading.Semaphore(0)

    def start_one() -> CacheTask:
        task: CacheTask = getattr(w.dist.cache_manager, method)(key, cache, *args)
        return task

    def then(_: CacheTask) -> None:
        codes.append(start_one().synchronize(20_000))
        left.release()

    for _ in range(count):
        start_one().add_done_callback(then)
    for _ in range(count):
        assert left.acquire(timeout=30)
    return codes


def awaited(w: World, method: str, key: Any, name: str, args: tuple[Any, ...], count: int) -> list[Any]:
    """The same through asyncio."""
    manager, cache = w.dist.cache_manager, w.held[name].cache

    async def main() -> list[Any]:
        return [await task for task in [getattr(manager, method)(key, cache, *args) for _ in range(count)]]

    return asyncio.run(main())


def in_threads(w: World, method: str, key: Any, name: str, args: tuple[Any, ...], count: int) -> list[Any]:
    """The plain calls, through asyncio.to_thread."""
    manager, cache = w.dist.cache_manager, w.held[name].cache

    async def main() -> list[Any]:
        call = getattr(manager, method)
        return list(await asyncio.gather(*(asyncio.to_thread(call, key, cache, *args) for _ in range(count))))

    return asyncio.run(main())


def threads(w: World) -> int:
    return sum(t.name == "llm-datadist-worker" for t in threading.enumerate())
