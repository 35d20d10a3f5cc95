"""An engine that records what the facade asks of it: for tests of arguments alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from llm_datadist._core.options import Options
from llm_datadist._engine.errands import Call, Desk, Errand
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.clusters import LinkInfo
from llm_datadist.enums import LLMRole, RegisterMemStatus
from llm_datadist.infos import PoolInfo
from llm_datadist.status import LLMStatusCode, NotLinkedError
from llm_datadist.tasks import CacheTask, TaskBook

T = TypeVar("T")
P = ParamSpec("P")


def _errand(method: Callable[P, T]) -> Callable[P, Errand[T]]:
    """The call is made when its errand is done, which is in the caller's thread."""

    def call(*args: P.args, **kwargs: P.kwargs) -> Errand[T]:
        return Errand(method.__name__, _DESK, lambda _: method(*args, **kwargs))

    return call


_DESK = Desk("fake")
_DESK.is_forbidden = lambda: True


class FakeEngine:
    """Succeeds at everything. ``calls`` holds (method, arguments) in order."""

    def __init__(self, role: LLMRole, cluster_id: int, options: Options) -> None:
        self.role = role
        self.cluster_id = cluster_id
        self.options = options
        self.calls: list[tuple[Any, ...]] = []
        self.link_codes: dict[int, LLMStatusCode] = {}
        self.link_errors: dict[int, str] = {}
        self.start_error: BaseException | None = None
        self.switch_error: BaseException | None = None
        self.listen_address = options.listen
        self.accessible = options.accessible

    def errand(self, name: str, job: Callable[[Call], T]) -> Errand[T]:
        return Errand(name, _DESK, job)

    def start(self) -> None:
        self.calls.append(("start",))
        if self.start_error is not None:
            raise self.start_error

    def finalize(self) -> None:
        self.calls.append(("finalize",))

    @_errand
    def register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: Sequence[Any],
        is_blocks: bool,
        remote_accessible: bool | None,
    ) -> Cache:
        self.calls.append(("register", desc, addrs, keys, is_blocks, remote_accessible))
        return Cache(len(self.calls), desc, addrs, is_blocks, life=self)

    @_errand
    def unregister(self, cache_id: int) -> None:
        self.calls.append(("unregister", cache_id))

    @_errand
    def remap(self, ranges: Sequence[Any]) -> None:
        self.calls.append(("remap", ranges))

    def caches(self) -> list[Any]:
        self.calls.append(("caches",))
        return []

    @_errand
    def allocate(self, desc: CacheDesc, keys: Sequence[Any], is_blocks: bool) -> Cache:
        self.calls.append(("allocate", desc, keys, is_blocks))
        return Cache(len(self.calls), desc, [1] * desc.num_tensors, is_blocks, life=self)

    @_errand
    def deallocate(self, cache: Cache, is_blocks: bool) -> None:
        self.calls.append(("deallocate", cache, is_blocks))

    @_errand
    def remove_key(self, key: Any) -> None:
        self.calls.append(("remove_key", key))

    def pool_info(self, placement: Any) -> PoolInfo:
        self.calls.append(("pool_info", placement))
        return PoolInfo(1, 1, 1, 0)

    def copy(self, request: Any) -> None:
        self.calls.append(("copy", request))

    def pull_again(self, key: Any, cache: Any, src_blocks: Any, dst_blocks: Any, started: float) -> bool:
        return False

    def pull(self, request: Any, started: float) -> None:
        self.calls.append(("pull", request))

    @_errand
    def push(self, request: Any) -> None:
        self.calls.append(("push", request))

    @_errand
    def pull_async(self, request: Any) -> CacheTask:
        self.calls.append(("pull_async", request))
        return TaskBook(1, lambda: None).task

    @_errand
    def push_async(self, request: Any) -> CacheTask:
        self.calls.append(("push_async", request))
        return TaskBook(1, lambda: None).task

    @_errand
    def send_notify(self, cluster_id: int, notice: Any) -> None:
        self.calls.append(("send_notify", cluster_id, notice))

    @_errand
    def notifies(self) -> list[Any]:
        self.calls.append(("notifies",))
        return []

    @_errand
    def push_layers(self, request: Any) -> CacheTask:
        self.calls.append(("push_layers", request))
        return TaskBook(len(request.configs), lambda: None).task

    def link(
        self, targets: list[tuple[int, tuple[str, int]]], timeout_ms: int, call: Call
    ) -> list[LLMStatusCode]:
        self.calls.append(("link", targets, timeout_ms))
        return [self.link_codes.get(cluster_id, LLMStatusCode.LLM_SUCCESS) for cluster_id, _ in targets]

    def unlink(self, cluster_ids: list[int], timeout_ms: int, force: bool, call: Call) -> list[LLMStatusCode]:
        self.calls.append(("unlink", cluster_ids, timeout_ms, force))
        return [self.link_codes.get(cluster_id, LLMStatusCode.LLM_SUCCESS) for cluster_id in cluster_ids]

    @_errand
    def link_comm(self, comm_name: str, ranks: Mapping[int, int], rank_table: str) -> int:
        self.calls.append(("link_comm", comm_name, ranks, rank_table))
        return 1

    def comm_status(self, comm_id: int) -> RegisterMemStatus:
        self.calls.append(("comm_status", comm_id))
        return RegisterMemStatus.PREPARING

    @_errand
    def unlink_comm(self, comm_id: int) -> None:
        self.calls.append(("unlink_comm", comm_id))

    def switch_role(self, role: LLMRole, listen: tuple[str, int] | None) -> None:
        self.calls.append(("switch_role", role, listen))
        if self.switch_error is not None:
            raise self.switch_error

    @_errand
    def drain(self, timeout_ms: int) -> None:
        self.calls.append(("drain", timeout_ms))

    def check_link(self, cluster_id: int) -> None:
        self.calls.append(("check_link", cluster_id))
        raise NotLinkedError(f"no link to cluster {cluster_id}")

    def links(self) -> list[LinkInfo]:
        return [LinkInfo(2, "10.0.0.1:26000", "tcp", (), "up", 0.0, 0, 0)]

    def link_error(self, cluster_id: int) -> str | None:
        return self.link_errors.get(cluster_id)
