"""One engine life: composes all parts, starts and ends them.

Order of the end: no new calls, all words cleared, all flights cut, peers told, threads and descriptors
gone. In a forked child only ``os.close`` is safe; see ``_close_in_child``.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llm_datadist._core.notices import Notice, NoticeQueue
from llm_datadist._core.options import Options
from llm_datadist._core.rank_table import BASE_PORT_VARIABLE
from llm_datadist._core.requests import (
    CopyBlocks,
    CopyCache,
    PullBlocks,
    PullCache,
    PushBlocks,
    PushCache,
    PushLayers,
    SwapBlocks,
)
from llm_datadist._engine.allocating import Allocator
from llm_datadist._engine.background import Background, Mover
from llm_datadist._engine.catalog import Catalog
from llm_datadist._engine.comms import Comms
from llm_datadist._engine.control_calls import ControlCalls
from llm_datadist._engine.copying import Copier
from llm_datadist._engine.draining import GRACE_S, Draining, not_idle
from llm_datadist._engine.endings import Endings
from llm_datadist._engine.errands import Call, Errand
from llm_datadist._engine.express import Express
from llm_datadist._engine.handler import Handler
from llm_datadist._engine.initiator import Initiator
from llm_datadist._engine.layerwise import LayerPusher
from llm_datadist._engine.linking import Linking
from llm_datadist._engine.notifications import Notifications
from llm_datadist._engine.pusher import Pusher
from llm_datadist._engine.receiver import Receiver
from llm_datadist._engine.responder import Responder
from llm_datadist._engine.state import State
from llm_datadist._engine.transport_set import CAPS, TransportSet
from llm_datadist._link.seam import Address
from llm_datadist._link.service import LinkService, LinkSettings
from llm_datadist.caches import Cache, CacheDesc, MemInfo
from llm_datadist.clusters import LinkInfo, Notify
from llm_datadist.enums import LLMRole, Placement, RegisterMemStatus
from llm_datadist.infos import CacheInfo, PoolInfo
from llm_datadist.keys import BlocksCacheKey, CacheKey
from llm_datadist.status import EngineFinalizedError, LLMStatusCode
from llm_datadist.tasks import CacheTask
from llm_datadist.transports.movers import Movers, default_mover_count

_TOKEN_NBYTES = 16
_FINALIZE_S = 1.0  # for background jobs that are being cut off
_LAST_BYTES_S = 0.5  # for callers' transfers that were cut: each finishes at most one call of 16 MiB

R = TypeVar("R")
T = TypeVar("T")

_living: dict[bytes, Engine] = {}  # by instance; from start to finalize, as their LLMDataDist


class Engine:
    """What is behind one initialised LLMDataDist."""

    def __init__(self, role: LLMRole, cluster_id: int, options: Options) -> None:
        self._options = options
        self._instance = secrets.token_bytes(_TOKEN_NBYTES)
        self._movers = Movers(_helpers(options.transfer_threads))
        state = self._state = State(cluster_id, options, CAPS)  # from here on there is memory to give back
        state.find_sibling = _find_sibling
        self._movers.elsewhere = state.do_elsewhere
        self._catalog = Catalog(state)
        self._initiator = Initiator(state)
        self._express = Express(state)
        self._pusher = Pusher(state)
        self._layer_pusher = LayerPusher(state)
        self._linking = Linking(state)
        self._comms = Comms(state, self._linking, os.environ.get(BASE_PORT_VARIABLE))
        self._draining = Draining(state, self._catalog)
        self._allocator = Allocator(state, self._catalog)
        self._responder = Responder(state)
        queue = NoticeQueue()
        self._endings = Endings(state, self._allocator, queue)
        self._notifications = Notifications(state, queue, self._endings)
        self._receiver = Receiver(state, self._endings)
        self._background = Background(state)
        self._copier = Copier(state, self._movers)
        self._transports = TransportSet(state, self._movers, self._responder)
        self._role = role

    def start(self) -> None:
        """Binds the listener and starts the control thread; when it has raised, nothing is left of it.

        Raises:
            LLMException: LLM_FAILED: the listener cannot bind. LLM_OUT_OF_MEMORY: threads, descriptors or memory.
            OSError: As the system reports it.
        """
        state, options = self._state, self._options
        handler = Handler(
            state,
            self._transports,
            self._catalog,
            self._responder,
            self._receiver,
            self._linking,
            self._draining,
            self._endings,
        )
        settings = LinkSettings(
            cluster_id=state.cluster_id,
            role=int(self._role),
            accessible=options.accessible,
            backend=options.backend,
            heartbeat_ms=options.heartbeat_interval_ms,
            link_timeout_ms=options.link_timeout_ms,
            retry_count=options.link_retry_count,
            listen=Address(*options.listen) if options.listen else None,
            advertise_ip=options.advertise_ip,
        )
        state.links = LinkService(
            settings,
            self._instance,
            handler,
            lambda: secrets.token_bytes(_TOKEN_NBYTES),
            ControlCalls(),
        )
        state.desk.is_forbidden = state.links.on_control_thread
        try:
            state.desk.open()
            state.pools.open()
            state.writability.open()
            state.links.open()
            self._transports.open()
            state.links.start()
        except BaseException:
            self._close_parts("init failed")
            state.slab.discard()
            raise
        _living[self._instance] = self

    def finalize(self) -> None:
        """Ends this life, within 2 s whatever peers do: calls under way get LLM_ENGINE_FINALIZED. Idempotent."""
        state = self._state
        error = EngineFinalizedError("the engine was finalized; call init again")
        with state.lock:
            if state.closed is not None:
                return
            state.closed = error
        state.slab.clear()
        state.flights.cut(lambda _: True, error)
        self._close_parts("finalized")
        _living.pop(self._instance, None)

    def _close_parts(self, reason: str) -> None:
        self._state.links.stop(reason)
        self._transports.close()
        self._state.workers.close(_FINALIZE_S)
        self._state.desk.close(_FINALIZE_S)
        self._state.dropped.close()
        self._movers.close()
        self._state.slab.close_descriptor()
        self._state.writability.close()
        self._close_pools()

    def _close_pools(self) -> None:
        """Unmaps the pools once nothing of ours writes there: the addresses may be another's the moment after."""
        state = self._state
        with state.lock:
            idle = state.condition.wait_for(
                lambda: not state.flights.where(lambda f: not f.serving), _LAST_BYTES_S
            )
        state.pools.close(unmap=idle)

    def close_in_child(self) -> None:
        """A forked child: closes its copies of the descriptors and touches nothing else."""
        self._state.links.close_after_fork()
        self._state.slab.close_descriptor()
        self._state.writability.close()
        self._state.pools.close_after_fork()
        self._transports.close_after_fork()

    # ---- what the facade asks for -------------------------------------------------------------------------

    @property
    def accessible(self) -> bool:
        """Mode B."""
        return self._state.accessible

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where it listens."""
        address = self._state.links.listen_address
        return (address.host, address.port) if address else None

    def errand(
        self, name: str, job: Callable[[Call], T], limit_s: tuple[float, Exception] | None = None
    ) -> Errand[T]:
        """A call that changes state, for a thread that no signal strikes."""
        return Errand(name, self._state.desk, job, limit_s)

    def register(
        self,
        desc: CacheDesc,
        addrs: Sequence[int],
        keys: Sequence[CacheKey] | Sequence[BlocksCacheKey],
        is_blocks: bool,
        remote_accessible: bool | None,
    ) -> Errand[Cache]:
        """See ``Catalog.register``."""
        return self.errand(
            "register",
            lambda call: self._catalog.register(
                desc, addrs, keys, is_blocks=is_blocks, remote_accessible=remote_accessible, call=call
            ),
        )

    def unregister(self, cache_id: int) -> Errand[None]:
        """See ``Catalog.unregister``."""
        return self.errand("unregister", lambda call: self._catalog.unregister(cache_id, call))

    def remap(self, ranges: Sequence[MemInfo]) -> Errand[None]:
        """See ``Catalog.remap``."""
        return self.errand("remap", lambda call: self._catalog.remap(ranges))

    def caches(self) -> list[CacheInfo]:
        """See ``Catalog.infos``."""
        return self._catalog.infos()

    def allocate(
        self, desc: CacheDesc, keys: Sequence[CacheKey] | Sequence[BlocksCacheKey], is_blocks: bool
    ) -> Errand[Cache]:
        """See ``Allocator.allocate``."""
        return self.errand(
            "allocate", lambda call: self._allocator.allocate(desc, keys, is_blocks=is_blocks, call=call)
        )

    def deallocate(self, cache: Cache, is_blocks: bool) -> Errand[None]:
        """See ``Allocator.deallocate``."""
        return self.errand(
            "deallocate", lambda call: self._allocator.deallocate(cache, is_blocks=is_blocks, call=call)
        )

    def remove_key(self, key: CacheKey) -> Errand[None]:
        """See ``Allocator.remove_key``."""
        return self.errand("remove_cache_key", lambda call: self._allocator.remove_key(key))

    def pool_info(self, placement: Placement) -> PoolInfo:
        """See ``Allocator.pool_info``."""
        return self._allocator.pool_info(placement)

    def copy(self, request: CopyCache | CopyBlocks | SwapBlocks) -> None:
        """See ``Copier.copy``."""
        self._copier.copy(request)

    def pull_again(self, key: Any, cache: Any, src_blocks: Any, dst_blocks: Any, started: float) -> bool:
        """See ``Express.pull``."""
        return self._express.pull(key, cache, src_blocks, dst_blocks, started)

    def pull(self, request: PullCache | PullBlocks, started: float) -> None:
        """See ``Initiator.pull``."""
        self._initiator.pull(request, started)
        self._express.learn(request)

    def push(self, request: PushCache | PushBlocks) -> Errand[None]:
        """See ``Pusher.push``."""
        return self.errand("push", lambda call: self._pusher.push(request, call))

    def pull_async(self, request: PullCache | PullBlocks) -> Errand[CacheTask]:
        """See ``Background.start``."""
        return self._begin("pull", request.key, self._initiator, request)

    def push_async(self, request: PushCache | PushBlocks) -> Errand[CacheTask]:
        """See ``Background.start``."""
        return self._begin("push", request.key, self._pusher, request)

    def _begin(self, name: str, key: object, mover: Mover[R], request: R) -> Errand[CacheTask]:
        started, what = time.monotonic(), f"a background {name} by {key!r}"
        return self.errand(name, lambda call: self._background.start(mover, request, what, started, call))

    def send_notify(self, cluster_id: int, notice: Notice) -> Errand[None]:
        """See ``Notifications.send``."""
        return self.errand("send_notify", lambda call: self._notifications.send(cluster_id, notice, call))

    def notifies(self) -> Errand[list[Notify]]:
        """See ``Notifications.take``. Mostly there are none, which whoever asks sees at once."""
        if self._notifications.none_came:
            return Errand("get_notifies", self._state.desk, self._notifications.take_none, here=True)
        return self.errand("get_notifies", self._notifications.take)

    def push_layers(self, request: PushLayers) -> Errand[CacheTask]:
        """See ``LayerPusher.push_layers``."""
        return self.errand("transfer_cache", lambda call: self._layer_pusher.push_layers(request, call))

    def link(
        self, targets: Sequence[tuple[int, tuple[str, int]]], timeout_ms: int, call: Call
    ) -> list[LLMStatusCode]:
        """See ``Linking.link``. For an errand."""
        return self._linking.link(targets, timeout_ms, call)

    def unlink(
        self, cluster_ids: Sequence[int], timeout_ms: int, force: bool, call: Call
    ) -> list[LLMStatusCode]:
        """See ``Linking.unlink``. For an errand."""
        return self._linking.unlink(cluster_ids, timeout_ms, call, force=force)

    def link_comm(self, comm_name: str, ranks: Mapping[int, int], rank_table: str) -> Errand[int]:
        """See ``Comms.link``."""
        return self.errand("link", lambda call: self._comms.link(comm_name, ranks, rank_table, call))

    def comm_status(self, comm_id: int) -> RegisterMemStatus:
        """See ``Comms.status``."""
        return self._comms.status(comm_id)

    def unlink_comm(self, comm_id: int) -> Errand[None]:
        """See ``Comms.unlink``."""
        return self.errand("unlink", lambda call: self._comms.unlink(comm_id, call))

    def switch_role(self, role: LLMRole, listen: tuple[str, int] | None) -> None:
        """See ``Linking.switch_role``. For an errand."""
        self._linking.switch_role(int(role), listen)

    def drain(self, timeout_ms: int) -> Errand[None]:
        """See ``Draining.drain``. A caller that is a signal handler may hold a lock that this waits for."""
        caller = threading.get_ident()
        limit_s = timeout_ms / 1000 + GRACE_S
        return self.errand(
            "drain",
            lambda call: self._draining.drain(timeout_ms, caller, call),
            (limit_s, not_idle(timeout_ms)),
        )

    def check_link(self, cluster_id: int) -> None:
        """See ``Linking.check``."""
        self._linking.check(cluster_id)

    def links(self) -> list[LinkInfo]:
        """See ``Linking.links``."""
        return self._linking.links()

    def link_error(self, cluster_id: int) -> str | None:
        """Why the last dial failed."""
        return self._state.links.link_error(cluster_id)


def _helpers(transfer_threads: int) -> int:
    """Movers beside the caller's thread; 0 threads in the options means by machine."""
    return transfer_threads - 1 if transfer_threads else default_mover_count()


def _find_sibling(instance: bytes) -> State | None:
    """The engine of this process that a peer turns out to be."""
    engine = _living.get(instance)
    return engine._state if engine else None


def _close_in_child() -> None:
    for engine in list(_living.values()):
        engine.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
