"""What peers are told to do with calls that are cut off, late, or lose their link; see ``actors``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist._engine.obligations import Decision
from llm_datadist.keys import CacheKey
from tests.support import allocated
from tests.support.world import World, wait_until

SUCCESS = LLMStatusCode.LLM_SUCCESS


def _code(call: Any, *args: Any, **more: Any) -> LLMStatusCode:
    try:
        call(*args, **more)
    except LLMException as exc:
        return exc.status_code
    return SUCCESS


def calls(
    w: World, method: str, keys: Sequence[Any], name: str, args: Sequence[Any], *, notify: bool, cancel: bool
) -> list[LLMStatusCode]:
    """One call a key, each with a notification of its number; ``cancel``: each at another moment of its life."""
    cache, manager, codes = w.held[name].cache, w.dist.cache_manager, []
    for number, key in enumerate(keys):
        more: dict[str, Any] = {"notify": (str(number), b"")} if notify else {}
        if not cancel:
            codes.append(_code(getattr(manager, method), key, cache, *args, **more))
            continue
        task = getattr(manager, f"{method}_async")(key, cache, *args, **more)
        until = time.perf_counter() + number % 25 * 25e-6
        while time.perf_counter() < until:
            pass
        task.cancel()
        codes.append(task.synchronize(10_000))
    return codes


def numbers(w: World) -> list[int]:
    """Of the notifications that have come."""
    return [int(n.name) for n in w.dist.get_notifies()]


def cancel_all(w: World, key: Any, name: str, count: int) -> list[LLMStatusCode]:
    """So many pulls in the background, all cancelled at once."""
    manager, cache = w.dist.cache_manager, w.held[name].cache
    tasks = [manager.pull_cache_async(key, cache) for _ in range(count)]
    for task in tasks:
        task.cancel()
    return [task.synchronize(10_000) for task in tasks]


def leases_end(w: World, within_s: float = 0.2) -> bool:
    """Whether no peer holds anything soon."""
    return wait_until(lambda: not any(i.leases for i in w.dist.cache_manager.caches()), within_s)


def unregister_in(w: World, name: str) -> float:
    """How long it takes."""
    began = time.monotonic()
    w.dist.cache_manager.unregister_cache(w.held[name].cache.cache_id)
    return time.monotonic() - began


def pull_key(w: World, cluster_id: int, req_id: int, pause_s: float = 0.0) -> tuple[LLMStatusCode, str]:
    """Pulls a request's slot; the outcome's code and text."""
    time.sleep(pause_s)
    try:
        w.dist.cache_manager.pull_cache(CacheKey(cluster_id, req_id), w.held["dst"].cache)
    except LLMException as exc:
        return exc.status_code, str(exc)
    return SUCCESS, ""


def force_unlink(w: World, cluster_id: int, pause_s: float) -> Any:
    """Drops the link, at a moment of a pull of its peer if there is one."""
    _in_a_pull(w, pause_s)
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    return w.dist.unlink_clusters([info], 2000, True)[0]


def finalize_after(w: World, pause_s: float) -> None:
    _in_a_pull(w, pause_s)
    w.dist.finalize()


def drain_after(w: World, pause_s: float, timeout_ms: int = 2000) -> None:
    _in_a_pull(w, pause_s)
    w.dist.drain(timeout_ms)


def links_end(w: World) -> bool:
    """Whether the last link soon goes."""
    return wait_until(lambda: not w.dist.links())


class _HeldDecision:
    """Stops calls between the last answer of their peer and what they tell it."""

    def __init__(self) -> None:
        self._make = Decision.make
        self.reached, self.go_on = threading.Event(), threading.Event()
        held = self

        def make(decision: Decision, *, ok: bool) -> bool:
            held.reached.set()
            held.go_on.wait(30)
            return held._make(decision, ok=ok)

        Decision.make = make  # type: ignore[method-assign]

    def close(self) -> None:
        Decision.make = self._make  # type: ignore[method-assign]
        self.go_on.set()


def hold_decisions(w: World) -> None:
    w.extras["held"] = _HeldDecision()


def decision_reached(w: World) -> bool:
    return bool(w.extras["held"].reached.wait(10))


def decide(w: World) -> None:
    w.extras.pop("held").close()


def key_and_pages(w: World, req_id: int, released: bool) -> str:
    """What is not as it must be: with its key a deallocated cache goes, and with that its pages; "": nothing."""
    wait_until(lambda: (("req", req_id) not in allocated.bound(w)) is released, 1)
    bound = ("req", req_id) in allocated.bound(w)
    if bound is released:
        return f"key {req_id} is {'still' if bound else 'not'} bound"
    w.dist.cache_manager.remove_cache_key(CacheKey(0, req_id))
    return "" if allocated.all_free(w) else f"pages of {req_id} are held"


def _in_a_pull(w: World, pause_s: float) -> None:
    """Returns so long after a peer has got a lease; none comes without a pause."""
    leases = w.dist._engine._state.leases
    _spin(0.05 if pause_s else 0.0, leases.all)
    _spin(pause_s)


def _spin(seconds: float, until: Callable[[], object] = lambda: False) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and not until():
        time.sleep(0)
