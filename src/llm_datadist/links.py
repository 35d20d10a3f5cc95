"""The links of an LLMDataDist: dialled by one side (``link_clusters``) or made by both (``link``).

Every call checks the state first, then types and ranges, and hands plain values to the engine. Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llm_datadist._core.options import RULE_OF_PROP
from llm_datadist._engine.errands import Call, Errand, handed_in
from llm_datadist._logs import get_logger
from llm_datadist.checks import check_int32, check_isinstance, check_uint32, check_uint64
from llm_datadist.clusters import LinkInfo, LLMClusterInfo
from llm_datadist.enums import RegisterMemStatus
from llm_datadist.status import LLMStatusCode, ParamInvalidError

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine

_log = get_logger("llm_datadist.link")
_LISTEN = RULE_OF_PROP["listen_ip_info"]


class Links:
    """The part of LLMDataDist that links."""

    def __init__(self) -> None:
        self._needs_local_ip = True
        self._problems: dict[int, str] = {}

    def _live(self) -> Engine:
        raise NotImplementedError

    def _begin_links(self, needs_local_ip: bool) -> None:
        self._needs_local_ip = needs_local_ip
        self._problems = {}

    # ---- dialled by one side -------------------------------------------------------------------------

    @handed_in
    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> Errand[tuple[LLMStatusCode, list[LLMStatusCode]]]:
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
        timeout_ms = checked_timeout("timeout", timeout)
        if self._needs_local_ip:
            _check_local_ip(clusters)
        return engine.errand(
            "link_clusters", lambda call: self._link_all(engine, ids, clusters, timeout_ms, call)
        )

    def _link_all(
        self, engine: Engine, ids: list[int], clusters: Sequence[LLMClusterInfo], timeout_ms: int, call: Call
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
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
            for i, code in zip(dialled, engine.link(targets, timeout_ms, call), strict=True):
                codes[i] = code
        return _overall(codes), codes

    @handed_in
    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> Errand[tuple[LLMStatusCode, list[LLMStatusCode]]]:
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
        timeout_ms = checked_timeout("timeout", timeout)
        check_isinstance("force", force, bool)

        def job(call: Call) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
            codes = engine.unlink(ids, timeout_ms, force, call) if ids else []
            return _overall(codes), codes

        return engine.errand("unlink_clusters", job)

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

    # ---- made by both sides --------------------------------------------------------------------------

    @handed_in
    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> Errand[int]:
        """Begins to link with clusters that call this as well; goes on in the background.

        Args:
            comm_name: A name for logs, 1 to 127 characters.
            cluster_rank_info: Cluster id -> rank of 2 to 4 clusters, this one among them, ranks ascending.
            rank_table: JSON text; where each rank listens. See docs/reference/links.md.

        Returns:
            The comm's id, for :meth:`query_register_mem_status` and :meth:`unlink`.

        Raises:
            TypeError: A wrong type.
            ValueError: A cluster id outside uint64, or a rank outside uint32.
            ParamInvalidError: A rule is broken; names the argument or the JSON path.
            LLMException: LLM_FAILED: no address of this rank can be listened on.
        """
        engine = self._live()
        check_isinstance("comm_name", comm_name, str)
        ranks = _ranks_of(cluster_rank_info)
        check_isinstance("rank_table", rank_table, str)
        return engine.link_comm(comm_name, ranks, rank_table)

    @handed_in
    def unlink(self, comm_id: int) -> Errand[None]:
        """Leaves a comm. A link that nothing else uses goes, after transfers in flight.

        Args:
            comm_id: What :meth:`link` returned.

        Raises:
            TypeError: Not an int.
            ValueError: Outside uint64.
            NotLinkedError: There is no such comm (any more).
            LinkBusyError: Transfers did not end within 3 s; the comm and its links stay.
        """
        engine = self._live()
        return engine.unlink_comm(check_uint64("comm_id", comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a comm has come: PREPARING, then OK (all are linked) or FAILED (the time is over), for good.

        Args:
            comm_id: What :meth:`link` returned.

        Raises:
            TypeError: Not an int.
            ValueError: Outside uint64.
            NotLinkedError: There is no such comm (any more).
        """
        engine = self._live()
        return engine.comm_status(check_uint64("comm_id", comm_id))

    def _keep_problem(self, cluster_id: int, text: str) -> None:
        self._problems[cluster_id] = f"cluster {cluster_id} has {text}"
        with suppress(Exception):  # a handler that raises must not break the call
            _log.warning("not linked: %s", self._problems[cluster_id])


def listen_of(switch_options: Any) -> tuple[str, int] | None:
    """Where the options of ``switch_role`` have it listen."""
    options = check_isinstance("switch_options", switch_options, dict, allow_none=True) or {}
    for key in options:
        check_isinstance("a key of switch_options", key, str)
    key = _LISTEN.keys[0]
    if key not in options:
        return None
    address: tuple[str, int] = _LISTEN.check(check_isinstance(f"switch_options[{key!r}]", options[key], str))
    return address


def _ranks_of(cluster_rank_info: Any) -> Mapping[int, int]:
    check_isinstance("cluster_rank_info", cluster_rank_info, dict)
    return {
        check_uint64("a cluster id of cluster_rank_info", cluster_id): check_uint32(
            f"cluster_rank_info[{cluster_id}]", rank
        )
        for cluster_id, rank in cluster_rank_info.items()
    }


def _ids_of(clusters: Any) -> list[int]:
    check_isinstance("clusters", clusters, (list, tuple))
    for i, info in enumerate(clusters):
        check_isinstance(f"clusters[{i}]", info, LLMClusterInfo)
        if info.remote_cluster_id is None:
            raise ParamInvalidError(f"clusters[{i}] has no remote_cluster_id; set it")
    return [info.remote_cluster_id for info in clusters]


def checked_timeout(name: str, timeout: Any) -> int:
    """A time in ms, int32 and > 0."""
    timeout_ms = check_int32(name, timeout)
    if timeout_ms <= 0:
        raise ParamInvalidError(f"{name} is {timeout_ms} ms; it must be greater than 0")
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
