"""LLMDataDist: the life of an engine; its links are in ``links``.

Every call checks the state first, then types and ranges, and hands a plain request to the engine.
Threads: any; init and finalize of one object exclude each other.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from llm_datadist import _instances
from llm_datadist._core.notices import checked_notice
from llm_datadist._core.options import Options, parse_options
from llm_datadist._engine import standard_streams
from llm_datadist._engine.errands import Call, Desk, Errand, handed_in
from llm_datadist._logs import get_logger
from llm_datadist._shortages import named
from llm_datadist.cache_manager import CacheManager
from llm_datadist.checks import check_isinstance, check_uint64
from llm_datadist.clusters import Notify
from llm_datadist.enums import LLMRole
from llm_datadist.links import Links, checked_timeout, listen_of
from llm_datadist.status import EngineFinalizedError, ParamInvalidError, TransferTimeoutError

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine

_log = get_logger("llm_datadist")
# Of an end, which takes 2 s. A thread that was interrupted while it held what the end needs would wait for itself.
_LATE_S = 10.0


class LLMDataDist(Links):
    """One member of a serving cluster: its caches, its links and the transfers between them.

    Args:
        role: What this process mainly does; it has no influence on what may be transferred.
        cluster_id: Its id, uint64, unique among all that are linked with each other.

    Raises:
        TypeError: A wrong type.
        ValueError: The id is outside uint64.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        super().__init__()
        self._role: LLMRole = check_isinstance("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._life_lock = _instances.new_life_lock()
        self._desk = Desk(f"llm-datadist-life-{cluster_id}")
        self._engine: Engine | None = None
        self._pid: int | None = None  # of the process that this life belongs to
        self._finalized = False
        self._cache_manager = CacheManager(self._live)

    @property
    def role(self) -> LLMRole:
        """What this process mainly does."""
        return self._role

    @property
    def cluster_id(self) -> int:
        """Its id."""
        return self._cluster_id

    @handed_in
    def init(self, options: dict[str, str]) -> Errand[None]:
        """Starts the engine; does nothing when it is started already.

        Those of the descriptors 0 to 2 that are closed are opened on /dev/null.

        Args:
            options: What ``LLMConfig.generate_options()`` returns; it is not changed.

        Raises:
            TypeError: Not a dict of str to str.
            ParamInvalidError: A bad option; names key, value and rule.
            FeatureNotEnabledError: An option that this version does not have.
            LLMException: LLM_FAILED: cannot listen, or another object is initialised in this process.
            OutOfMemoryError: A pool, a thread, a descriptor or memory is not to be had; nothing is left behind.
            RuntimeError: The object was initialised by the parent of this forked process.
        """
        self._refuse_other_process()
        return Errand("init", self._desk, lambda call: self._init(options, call))

    def _init(self, options: dict[str, str], call: Call) -> None:
        with self._life_lock:
            if self._engine is not None:
                return
            parsed = parse_options(options)
            _warn_of_unknown(parsed.unknown)
            _warn_of_loopback(parsed.advertise_ip)
            _instances.claim(self, beside_others=parsed.allow_multiple_instances)
            self._pid = os.getpid()
            try:
                with named(f"LLMDataDist {self._cluster_id} cannot be initialised"):
                    standard_streams.occupy()
                    engine = _new_engine(self._role, self._cluster_id, parsed)
                    engine.start()
            except BaseException:
                self._pid = None
                _instances.release(self)
                raise
            self._begin_links(parsed.needs_local_ip)
            self._finalized = False
            self._engine = engine
            call.on_drop(self._finalize)

    @handed_in
    def finalize(self) -> Errand[None]:
        """Tells the peers and ends the engine; calls it cuts off get LLM_ENGINE_FINALIZED. Idempotent.

        Raises:
            RuntimeError: The object was initialised by the parent of this forked process.
        """
        self._refuse_other_process()
        late = TransferTimeoutError(
            f"LLMDataDist {self._cluster_id} goes on ending; it is late by {_LATE_S:g} s"
        )
        return Errand("finalize", self._desk, lambda call: self._finalize(), (_LATE_S, late), or_here=True)

    def _finalize(self) -> None:
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

    @handed_in
    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> Errand[None]:
        """Takes another role, or the same, and listens where the options say. Caches stay.

        Args:
            role: The new role; it has no influence on what may be transferred.
            switch_options: ``llm.listenIpInfo``: listen there (again, if it is another address). Without it:
                do not listen any more. Other keys are ignored.

        Raises:
            TypeError: A wrong type.
            ParamInvalidError: A bad address.
            LLMException: LLM_EXIST_LINK: there are links. LLM_FAILED: it cannot listen there; nothing has changed.
        """
        engine = self._live()
        check_isinstance("role", role, LLMRole)
        listen = listen_of(switch_options)

        def job(call: Call) -> None:
            engine.switch_role(role, listen)
            self._role = role

        return engine.errand("switch_role", job)

    @handed_in
    def drain(self, timeout_ms: int) -> Errand[None]:
        """Lets the transfers under way end and begins no new ones: what to do before ``finalize``.

        From now on transfers that begin get LLM_LINK_BUSY, here and at peers, also when this raises. Tasks and
        leases that have begun go on. May be called in a signal handler; a transfer that the handler itself has
        interrupted cannot end meanwhile and is not waited for.

        Args:
            timeout_ms: How long to wait, ms, int32 and > 0.

        Raises:
            TypeError: Not an int.
            ValueError: Outside int32.
            ParamInvalidError: Not positive.
            LinkBusyError: Transfers are in flight after that time; the text says which.
            OutOfMemoryError: No thread can be started; nothing has changed.
        """
        engine = self._live()
        return engine.drain(checked_timeout("timeout_ms", timeout_ms))

    @handed_in
    def send_notify(self, remote_cluster_id: int, name: str, message: bytes) -> Errand[None]:
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
        return engine.send_notify(cluster_id, checked_notice("name", name, "message", message))

    @handed_in
    def get_notifies(self) -> Errand[list[Notify]]:
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


def _new_engine(role: LLMRole, cluster_id: int, options: Options) -> Engine:
    # Imported here: the engine brings sockets and threads, which a program that only describes caches spares.
    from llm_datadist._engine.engine import Engine

    return Engine(role, cluster_id, options)


def _warn_of_loopback(advertise_ip: str | None) -> None:
    if advertise_ip is not None and (advertise_ip in ("::1", "localhost") or advertise_ip.startswith("127.")):
        with suppress(Exception):
            _log.warning("llm.AdvertiseIp is %s: peers on other hosts cannot dial that", advertise_ip)


def _warn_of_unknown(keys: tuple[str, ...]) -> None:
    if keys:
        with suppress(Exception):  # a handler that raises must not break init
            _log.warning("options without meaning here are ignored: %s", ", ".join(keys))
