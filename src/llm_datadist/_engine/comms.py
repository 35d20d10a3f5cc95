"""Two-sided links: ``link``, ``unlink(comm_id)``, ``query_register_mem_status``.

Each side listens on its own addresses of the rank table and dials the lower ranks, one address after the
other, until all clusters are linked or the time is over. A comm owns no links: it holds clusters, and a link
goes when neither a comm nor link_clusters holds its cluster. OK and FAILED are final.
Threads: ``link``, ``unlink`` and ``status`` any; all else runs on the control thread, by its timers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from llm_datadist._core.rank_table import Comm, RankEntry, read_comm
from llm_datadist._engine.errands import Call
from llm_datadist._engine.linking import Linking
from llm_datadist._engine.state import State
from llm_datadist._link.dials import LINKED
from llm_datadist._link.listeners import Held
from llm_datadist._link.loop import TimerHandle
from llm_datadist._link.seam import Address, Target
from llm_datadist._link.service import LinkService
from llm_datadist._logs import get_logger
from llm_datadist.enums import RegisterMemStatus
from llm_datadist.status import (
    LinkBusyError,
    LLMException,
    LLMStatusCode,
    NotLinkedError,
    ParamInvalidError,
)

UNLINK_S = 3.0  # for transfers in flight when a comm is left; what unlink_clusters waits by default
FIRST_TRY_S = 1.0  # for one of several addresses, doubled in each round: the right one may be slow
LONGEST_TRY_S = 10.0  # a handshake ends after that time anyway
FIRST_PAUSE_S = 0.1  # between rounds, doubled: the peer has not been started yet
LONGEST_PAUSE_S = 0.5

_LOG = get_logger("llm_datadist.link")
_OVER = LLMStatusCode.LLM_ENGINE_FINALIZED
_HOPELESS = LLMStatusCode.LLM_PARAM_INVALID  # the sides differ in mode: no later try can end otherwise


class Comms:
    """The comms of this engine. ``base_port``: what HCCL_IF_BASE_PORT was at init."""

    def __init__(self, state: State, linking: Linking, base_port: str | None) -> None:
        self._state = state
        self._linking = linking
        self._base_port = base_port
        self._comms: dict[int, _Linking] = {}
        self._last_id = 0
        state.on_link_change = self._on_link_change

    def link(self, comm_name: str, ranks: Mapping[int, int], rank_table: str, call: Call) -> int:
        """Checks, listens and begins to dial; the id of the comm.

        Raises:
            ParamInvalidError: Naming the argument or the JSON path.
            LLMException: LLM_FAILED: no address of ours can be listened on, and peers are to dial us.
        """
        state = self._state
        comm = read_comm(state.cluster_id, comm_name, ranks, rank_table, self._base_port)
        held = self._listen(comm)
        deadline = time.monotonic() + state.options.link_total_time_s
        with state.lock:
            if state.closed is None:
                self._last_id += 1
                linking = _Linking(state, self._last_id, comm_name, comm, held, deadline)
                self._comms[linking.comm_id] = linking
                state.comms_alive += 1
                state.comm_holds.update(linking.clusters)
        state.check_open()
        state.links.call_soon(linking.begin)
        call.on_drop(lambda: self._leave(linking.comm_id, 0.0, call))
        return linking.comm_id

    def _listen(self, comm: Comm) -> Held:
        links, mine = self._state.links, comm.mine
        try:
            held = links.hold([Address(host, mine.port) for host in mine.hosts])
        except LLMException:
            if comm.awaited:
                raise
            return Held(())  # nobody dials the highest rank
        if comm.awaited and not held.ports and links.listen_address is None:
            raise ParamInvalidError(
                f"{mine.path}: none of the addresses {', '.join(mine.hosts)} of this rank ({mine.rank}) is local, so "
                f"the clusters {sorted(comm.awaited)} cannot dial it; correct device_ip or host_ip, or set "
                "LLMConfig.listen_ip_info"
            )
        return held

    def status(self, comm_id: int) -> RegisterMemStatus:
        """How far it has come.

        Raises:
            NotLinkedError: Unknown id.
        """
        with self._state.lock:
            return self._get(comm_id).status

    def unlink(self, comm_id: int, call: Call) -> None:
        """Leaves a comm; links that nothing else holds go.

        Raises:
            NotLinkedError: Unknown id.
            LinkBusyError: Transfers are in flight; the comm and its links stay.
        """
        self._leave(comm_id, UNLINK_S, call)

    def _leave(self, comm_id: int, timeout_s: float, call: Call) -> None:
        state = self._state
        with state.lock:
            linking = self._get(comm_id)
            linking.leaving = True
        state.links.run(lambda: linking.fail("it was unlinked"))
        with state.lock:
            linking.let_go()
            free = [c for c in linking.clusters if not state.comm_holds[c]]
        try:
            codes = self._linking.leave(free, timeout_s, call)
        except BaseException:
            with state.lock:
                linking.hold_again()
            raise
        busy = [c for c, code in zip(free, codes, strict=True) if code == LLMStatusCode.LLM_LINK_BUSY]
        with state.lock:
            if busy:
                linking.hold_again()
            else:
                del self._comms[comm_id]
                state.comms_alive -= 1
        if busy:
            raise LinkBusyError(
                f"comm {comm_id} ({linking.name!r}) stays: transfers with the clusters {busy} are in flight and did "
                f"not end within {timeout_s:g} s; wait for them, then unlink again"
            )
        state.links.run(linking.stop_listening)

    def _get(self, comm_id: int) -> _Linking:
        linking = self._comms.get(comm_id)
        if linking is None or linking.leaving:
            raise NotLinkedError(
                f"there is no comm {comm_id}; link(...) returns the ids of those that there are"
            )
        return linking

    def _on_link_change(self, cluster_id: int) -> None:
        """A link came up or went down. What is found by ``links.get`` is up to date a turn later."""
        with self._state.lock:
            concerned = [c for c in self._comms.values() if cluster_id in c.clusters and c.preparing]
        for linking in concerned:
            self._state.links.call_soon(linking.look)


class _Linking:
    """One comm."""

    def __init__(
        self, state: State, comm_id: int, name: str, comm: Comm, held: Held, deadline: float
    ) -> None:
        self._state = state
        self.comm_id = comm_id
        self.name = name
        self.status = RegisterMemStatus.PREPARING
        self.leaving = False
        self.clusters = (*comm.dialled, *comm.awaited)
        self._awaited = comm.awaited
        self._held = held
        self._holds = True  # its clusters are counted in ``comm_holds``
        self._began = time.monotonic()
        self._deadline = deadline
        self._timer: TimerHandle | None = None
        self._tries = [
            _Tries(state.links, cluster_id, entry, deadline, self.look, self.fail)
            for cluster_id, entry in comm.dialled.items()
        ]

    @property
    def preparing(self) -> bool:
        """Whether it still works."""
        return self.status is RegisterMemStatus.PREPARING

    # ---- under the engine's lock ------------------------------------------------------------------------

    def let_go(self) -> None:
        """Its clusters are not held by it any more. Idempotent."""
        if self._holds:
            self._holds = False
            self._state.comm_holds.subtract(self.clusters)

    def hold_again(self) -> None:
        """It is not left after all."""
        self.leaving = False
        if self.status is RegisterMemStatus.OK and not self._holds:
            self._holds = True
            self._state.comm_holds.update(self.clusters)

    # ---- control thread ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Dials, and looks at what is linked already."""
        if self.preparing:
            self._timer = self._state.links.call_at(self._deadline, lambda: self.fail("the time is over"))
            for tries in self._tries:
                tries.next()
            self.look()

    def look(self) -> None:
        """OK, once all are linked at the same time."""
        if not self.preparing:
            return
        for tries in self._tries:
            if tries.linked and self._state.links.get(tries.cluster_id) is None:
                tries.again()
        if not self._missing():
            self.status = RegisterMemStatus.OK
            self._stop_work()
            _LOG.log(
                logging.INFO, "comm %d (%r) is ready: clusters %s", self.comm_id, self.name, self.clusters
            )

    def fail(self, reason: str) -> None:
        """FAILED, unless it is final already."""
        if not self.preparing:
            return
        reasons = self._reasons()
        self.status = RegisterMemStatus.FAILED
        self._stop_work()
        self.stop_listening()
        with self._state.lock:
            self.let_go()
            if self.leaving:
                return
        _LOG.log(
            logging.WARNING, "comm %d (%r) has failed after %.1f s, %s: %s",
            self.comm_id, self.name, time.monotonic() - self._began, reason, "; ".join(reasons),
        )  # fmt: skip

    def stop_listening(self) -> None:
        """Idempotent."""
        held, self._held = self._held, Held(())
        self._state.links.release(held)

    def _missing(self) -> list[int]:
        undialled = {tries.cluster_id for tries in self._tries if not tries.linked}
        get = self._state.links.get
        return [c for c in self.clusters if c in undialled or get(c) is None]

    def _reasons(self) -> list[str]:
        links = self._state.links
        for cluster_id in self._missing():
            entry = self._awaited.get(cluster_id)
            if entry is not None:
                where = ", ".join(map(str, self._held.addresses)) or "its listen address"
                links.note_error(
                    cluster_id, f"cluster {cluster_id} (rank {entry.rank}) did not dial this one at {where}"
                )
        return [links.link_error(c) or f"no link to cluster {c}" for c in self._missing()]

    def _stop_work(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for tries in self._tries:
            tries.stop()


class _Tries:
    """Dials one cluster until it is linked. Control thread only."""

    def __init__(
        self,
        links: LinkService,
        cluster_id: int,
        entry: RankEntry,
        deadline: float,
        on_linked: Callable[[], None],
        on_hopeless: Callable[[str], None],
    ) -> None:
        self._links = links
        self.cluster_id = cluster_id
        self._addresses = [Address(host, entry.port) for host in entry.hosts]
        self._deadline = deadline
        self._on_linked = on_linked
        self._on_hopeless = on_hopeless
        self.linked = False
        self._count = 0
        self._stopped = False
        self._give_up: Callable[[], None] | None = None
        self._pause: TimerHandle | None = None

    def next(self) -> None:
        """Tries the next address."""
        if self._stopped or self.linked:
            return
        round_, at = divmod(self._count, len(self._addresses))
        self._count += 1
        limit_s = (
            LONGEST_TRY_S
            if len(self._addresses) == 1
            else min(FIRST_TRY_S * 2 ** min(round_, 8), LONGEST_TRY_S)
        )
        target = Target(self.cluster_id, self._addresses[at])
        until = min(time.monotonic() + limit_s, self._deadline)
        self._give_up = self._links.dial_quietly(target, until, self._done)

    def again(self) -> None:
        """The link went down while others were awaited."""
        self.linked = False
        self._count = 0
        self._wait()

    def stop(self) -> None:
        """Ends what is under way. Idempotent."""
        self._stopped = True
        if self._give_up is not None:
            self._give_up()
        if self._pause is not None:
            self._pause.cancel()

    def _done(self, code: LLMStatusCode) -> None:
        self._give_up = None
        if self._stopped or code == _OVER:
            return
        if code in LINKED:
            self.linked = True
            self._on_linked()
        elif code == _HOPELESS:
            self._on_hopeless("the sides do not fit together")
        elif self._count % len(self._addresses):
            self._links.call_soon(self.next)
        else:
            self._wait()

    def _wait(self) -> None:
        rounds = min(self._count // len(self._addresses), 8)
        pause_s = min(FIRST_PAUSE_S * 2**rounds, LONGEST_PAUSE_S)
        self._pause = self._links.call_at(time.monotonic() + pause_s, self.next)
