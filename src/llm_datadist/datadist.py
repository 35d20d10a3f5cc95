"""LLMDataDist: the life of an engine, and its links.

Every call checks the state first, then types and ranges, and hands a plain request to the engine.
Threads: any; init and finalize of one object exclude each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llm_datadist import _instances
from llm_datadist._core.notices import checked_notice
from llm_datadist._core.options import Options, parse_options
from llm_datadist.cache_manager import CacheManager
from llm_datadist.checks import check_int32, check_isinstance, check_uint64
from llm_datadist.clusters import LinkInfo, LLMClusterInfo, Notify
from llm_datadist.enums import LLMRole
from llm_datadist.status import EngineFinalizedError, LLMStatusCode, ParamInvalidError

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine

_log = logging.getLogger("llm_datadist")
_link_log = logging.getLogger("llm_datadist.link")


class LLMDataDist:
    """One member of a serving cluster: its caches, its links and the transfers between them.

    Args:
        role: What this process mainly does; it has no influence on what may be transferred.
        cluster_id: Its id, uint64, unique among all that are linked with each other.

    Raises:
        TypeError: A wrong type.
        ValueError: The id is outside uint64.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._role: LLMRole = check_isinstance("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._life_lock = _instances.new_life_lock()
        self._engine: Engine | None = None
        self._pid: int | None = None  # of the process that this life belongs to
        self._finalized = False
        self._needs_local_ip = True
        self._problems: dict[int, str] = {}
        self._cache_manager = CacheManager(self._live)

    @property
    def role(self) -> LLMRole:
        """What this process mainly does."""
        return self._role

    @property
    def cluster_id(self) -> int:
        """Its id."""
        return self._cluster_id

    def init(self, options: dict[str, str]) -> None:
        """Starts the engine; does nothing when it is started already.

        Args:
            options: What ``LLMConfig.generate_options()`` returns; it is not changed.

        Raises:
            TypeError: Not a dict of str to str.
            ParamInvalidError: A bad option; names key, value and rule.
            FeatureNotEnabledError: An option that this version does not have.
            LLMException: LLM_FAILED: cannot listen, or another object is initialised in this process.
            RuntimeError: The object was initialised by the parent of this forked process.
        """
        self._refuse_other_process()
        with self._life_lock:
            if self._engine is not None:
                return
            parsed = parse_options(options)
            _warn_of_unknown(parsed.unknown)
            _instances.claim(self, beside_others=parsed.allow_multiple_instances)
            self._pid = os.getpid()
            try:
                engine = _new_engine(self._role, self._cluster_id, parsed)
                engine.start()
            except BaseException:
                self._pid = None
                _instances.release(self)
                raise
            self._needs_local_ip = parsed.needs_local_ip
            self._problems = {}
            self._finalized = False
            self._engine = engine

    def finalize(self) -> None:
        """Tells the peers and ends the engine; calls it cuts off get LLM_ENGINE_FINALIZED. Idempotent.

        Raises:
            RuntimeError: The object was initialised by the parent of this forked process.
        """
        self._refuse_other_process()
        with self._life_lock:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            self._finalized = True
            try:
                engine.finalize()
            finally:
                self._pid = None
                _instances.release(self)

    @property
    def cache_manager(self) -> CacheManager:
        """Caches and transfers.

        Raises:
            RuntimeError: Not initialised; EngineFinalizedError after finalize.
        """
        self._live()
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> CacheManager:
        """Not available in this mode.

        Raises:
            ParamInvalidError: Always.
        """
        self._live()
        raise ParamInvalidError(
            "kv_cache_manager is not available with llm.EnableCacheManager '1'; use cache_manager"
        )

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where the engine listens, with the real port; None without a listener."""
        return self._live().listen_address

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Links with clusters, in parallel.

        Args:
            clusters: Each with its id and exactly one remote address.
            timeout: Time for all of it, ms, int32 and > 0.

        Returns:
            The last code that is not LLM_SUCCESS (or LLM_SUCCESS), and one code per cluster; see
            :meth:`link_error` for the reason of one.

        Raises:
            TypeError: A wrong type.
            ValueError: ``timeout`` outside int32.
            ParamInvalidError: ``timeout`` not positive, an id or the local address not set.
        """
        engine = self._live()
        ids = _ids_of(clusters)
        timeout_ms = _checked_timeout(timeout)
        if self._needs_local_ip:
            _check_local_ip(clusters)
        codes = [LLMStatusCode.LLM_PARAM_INVALID] * len(ids)
        dialled: list[int] = []
        targets: list[tuple[int, tuple[str, int]]] = []
        for i, (cluster_id, info) in enumerate(zip(ids, clusters, strict=True)):
            addresses = info.remote_ip_info_list
            if len(addresses) == 1:
                dialled.append(i)
                targets.append((cluster_id, addresses[0]))
            else:
                self._keep_problem(
                    cluster_id, f"{len(addresses)} remote addresses; append_remote_ip_info exactly one"
                )
        for cluster_id, _ in targets:
            self._problems.pop(cluster_id, None)
        if targets:
            for i, code in zip(dialled, engine.link(targets, timeout_ms), strict=True):
                codes[i] = code
        return _overall(codes), codes

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Ends links.

        Args:
            clusters: Each with its id; addresses are not needed.
            timeout: Time for all of it, ms, int32 and > 0.
            force: Drop this side at once, and cut off transfers in flight.

        Returns:
            The last code that is not LLM_SUCCESS (or LLM_SUCCESS), and one code per cluster.

        Raises:
            TypeError: A wrong type.
            ValueError: ``timeout`` outside int32.
            ParamInvalidError: ``timeout`` not positive, or an id not set.
        """
        engine = self._live()
        ids = _ids_of(clusters)
        timeout_ms = _checked_timeout(timeout)
        check_isinstance("force", force, bool)
        codes = engine.unlink(ids, timeout_ms, force) if ids else []
        return _overall(codes), codes

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Returns when the link answers a ping within sync_kv_timeout.

        Raises:
            TypeError: The id is not an int.
            ValueError: The id is outside uint64.
            NotLinkedError: There is no link.
            LinkFailedError: It went down.
            TransferTimeoutError: LLM_TIMEOUT: no answer.
        """
        engine = self._live()
        engine.check_link(check_uint64("remote_cluster_id", remote_cluster_id))

    def links(self) -> list[LinkInfo]:
        """All links that are up or silent."""
        return self._live().links()

    def link_error(self, remote_cluster_id: int) -> str | None:
        """Why that cluster was not linked at the last attempt; None after a success or without one."""
        engine = self._live()
        cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)
        return self._problems.get(cluster_id) or engine.link_error(cluster_id)

    def send_notify(self, remote_cluster_id: int, name: str, message: bytes) -> None:
        """Puts a notification into a peer's queue; returns when it is there, within sync_kv_timeout.

        Args:
            remote_cluster_id: The peer, uint64.
            name: At most 64 KiB in UTF-8.
            message: At most 64 KiB.

        Raises:
            TypeError: A wrong type.
            ValueError: The id is outside uint64.
            ParamInvalidError: ``name`` or ``message`` is too long.
            NotLinkedError: There is no link.
            OutOfMemoryError: The peer's queue of 4,096 is full.
            LinkFailedError: The link went down.
            TransferTimeoutError: LLM_TIMEOUT: no answer; a peer that was stopped will not get it later.
        """
        engine = self._live()
        cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)
        engine.send_notify(cluster_id, checked_notice("name", name, "message", message))

    def get_notifies(self) -> list[Notify]:
        """All notifications that peers have sent since the last call, in the order of their coming."""
        return self._live().notifies()

    def _live(self) -> Engine:
        """The engine of this life.

        Raises:
            RuntimeError: Not initialised, or by another process; EngineFinalizedError after finalize.
        """
        engine = self._engine
        if engine is not None and self._pid == os.getpid():
            return engine
        self._refuse_other_process()
        if self._finalized:
            raise EngineFinalizedError(
                f"LLMDataDist {self._cluster_id} is finalized; call init(options) to use it again"
            )
        raise RuntimeError(f"LLMDataDist {self._cluster_id} is not initialised; call init(options) first")

    def _refuse_other_process(self) -> None:
        if self._pid is not None and self._pid != os.getpid():
            raise RuntimeError(
                f"LLMDataDist {self._cluster_id} was initialised in process {self._pid}, this is "
                f"{os.getpid()}: an engine does not survive a fork; make a new LLMDataDist in the child"
            )

    def _keep_problem(self, cluster_id: int, text: str) -> None:
        self._problems[cluster_id] = f"cluster {cluster_id} has {text}"
        with suppress(Exception):  # a handler that raises must not break the call
            _link_log.warning("not linked: %s", self._problems[cluster_id])


def _new_engine(role: LLMRole, cluster_id: int, options: Options) -> Engine:
    # Imported here: the engine brings sockets and threads, which a program that only describes caches spares.
    from llm_datadist._engine.engine import Engine

    return Engine(role, cluster_id, options)


def _warn_of_unknown(keys: tuple[str, ...]) -> None:
    if keys:
        with suppress(Exception):  # a handler that raises must not break init
            _log.warning("options without meaning here are ignored: %s", ", ".join(keys))


def _ids_of(clusters: Any) -> list[int]:
    check_isinstance("clusters", clusters, (list, tuple))
    for i, info in enumerate(clusters):
        check_isinstance(f"clusters[{i}]", info, LLMClusterInfo)
        if info.remote_cluster_id is None:
            raise ParamInvalidError(f"clusters[{i}] has no remote_cluster_id; set it")
    return [info.remote_cluster_id for info in clusters]


def _checked_timeout(timeout: Any) -> int:
    timeout_ms = check_int32("timeout", timeout)
    if timeout_ms <= 0:
        raise ParamInvalidError(f"timeout is {timeout_ms} ms; it must be greater than 0")
    return timeout_ms


def _check_local_ip(clusters: Sequence[LLMClusterInfo]) -> None:
    for i, info in enumerate(clusters):
        if not info.local_ip_info_list:
            raise ParamInvalidError(
                f"clusters[{i}] (cluster {info.remote_cluster_id}) has no local address; "
                "call append_local_ip_info (its port may be 0), or set LLMConfig.local_comm_res"
            )


def _overall(codes: Sequence[LLMStatusCode]) -> LLMStatusCode:
    """The last code that is not success; an empty list is itself a bad argument."""
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID
    bad = [code for code in codes if code != LLMStatusCode.LLM_SUCCESS]
    return bad[-1] if bad else LLMStatusCode.LLM_SUCCESS
