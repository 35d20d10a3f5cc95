"""Links as callers see them: link, unlink, check, list.

A link goes with the last that holds it: link_clusters, on either side, or a comm of this one.
``unlink`` drops a link only when nothing is in flight on either side, or by force. While it waits for that its side
begins nothing new there, so calls that follow each other do not keep it from its end; then it asks the peer, whose
side does the same with its own calls. Who asked drops the connection; the peer marks its side as unlinked and sees
it go.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from llm_datadist._engine.asked import Question
from llm_datadist._engine.errands import Call
from llm_datadist._engine.flights import LAST_BYTES_S
from llm_datadist._engine.state import Peer, State, describe, peer_of, tell
from llm_datadist._link.dials import LINKED
from llm_datadist._link.link import Link, LinkLost, NoAnswer
from llm_datadist._link.seam import Address, Target
from llm_datadist._logs import get_logger
from llm_datadist._shortages import start_thread
from llm_datadist._waiting import check_outside
from llm_datadist._wire.messages import Done, Unlink
from llm_datadist.clusters import LinkInfo
from llm_datadist.status import (
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    OutOfMemoryError,
    TransferTimeoutError,
    code_of,
)

_LOG = get_logger("llm_datadist.link")
# Answers to Unlink with which the link stays -> what our caller gets.
_STAYS = {
    LLMStatusCode.LLM_LINK_BUSY: LLMStatusCode.LLM_LINK_BUSY,
    LLMStatusCode.LLM_EXIST_LINK: LLMStatusCode.LLM_SUCCESS,
}
_PEERS_SHARE = 0.9  # of the time of an unlink that the peer may wait for its transfers
_ANSWER_S = 0.25  # for its answer to arrive, at least; a busy machine is not a dead peer


class Linking:
    """Link operations of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    def link(
        self, targets: Sequence[tuple[int, tuple[str, int]]], timeout_ms: int, call: Call
    ) -> list[LLMStatusCode]:
        """Dials all in parallel; one code per target. A cut gives up what is not linked yet."""
        wanted = [Target(cluster_id, Address(*address)) for cluster_id, address in targets]
        codes = self._state.links.dial(wanted, timeout_ms / 1000, call.on_cut)
        for target, code in zip(wanted, codes, strict=True):
            link = self._state.links.get(target.cluster_id)
            if code in LINKED and link is not None:
                peer_of(link).by_clusters = True
        return codes

    def switch_role(self, role: int, listen: tuple[str, int] | None) -> None:
        """Listens there, or (None) not any more; later links are told the role.

        Raises:
            LLMException: LLM_EXIST_LINK: there are links; LLM_FAILED: it cannot listen there.
        """
        state = self._state
        linked = [link for link in state.links.links() if not peer_of(link).unlinked]
        if linked:
            raise LLMException(
                f"links are up: {', '.join(map(describe, linked))}; unlink them (unlink_clusters, unlink) before "
                "switch_role",
                status_code=LLMStatusCode.LLM_EXIST_LINK,
            )
        state.links.listen_on(None if listen is None else Address(*listen))
        state.links.set_role(role)

    def check(self, cluster_id: int) -> None:
        """Returns when the link answers a ping within sync_kv_timeout.

        Raises:
            NotLinkedError: No link.
            LinkFailedError: It went down.
            TransferTimeoutError: LLM_TIMEOUT.
            LinkBusyError: The engine waits for this thread, which a signal handler has interrupted.
        """
        check_outside("check_link_status")
        state = self._state
        started = time.monotonic()
        link = state.link_to(cluster_id)
        try:
            state.links.ping(link, started + state.timeout_s)
        except LinkLost as exc:
            raise LinkFailedError(
                f"{describe(link)}: the link went down: {exc}; call link_clusters again"
            ) from exc.__cause__ or exc
        except NoAnswer as exc:
            elapsed = (time.monotonic() - started) * 1000
            raise TransferTimeoutError(
                f"{describe(link)} did not answer a ping within {elapsed:.0f} ms; it is stopped, overloaded or cut off"
            ) from exc

    def links(self) -> list[LinkInfo]:
        """All links that are up or silent."""
        return [_info(link) for link in self._state.links.links() if not peer_of(link).unlinked]

    # ---- unlinking --------------------------------------------------------------------------------------------

    def unlink(
        self, cluster_ids: Sequence[int], timeout_ms: int, call: Call, *, force: bool
    ) -> list[LLMStatusCode]:
        """Drops links that no comm holds, in parallel; one code per cluster. A cut ends the waiting."""
        deadline = time.monotonic() + timeout_ms / 1000
        call.on_cut(self._state.condition.notify_all)
        return _in_parallel(
            cluster_ids, lambda cluster_id: self._unlink(cluster_id, deadline, call, force=force)
        )

    def leave(self, cluster_ids: Sequence[int], timeout_s: float, call: Call) -> list[LLMStatusCode]:
        """Drops links that link_clusters holds on neither side, in parallel; one code per cluster."""
        deadline = time.monotonic() + timeout_s
        call.on_cut(self._state.condition.notify_all)
        return _in_parallel(cluster_ids, lambda cluster_id: self._leave(cluster_id, deadline, call))

    def _leave(self, cluster_id: int, deadline: float, call: Call) -> LLMStatusCode:
        link = self._state.links.get(cluster_id)
        if link is None or peer_of(link).by_clusters:
            return LLMStatusCode.LLM_SUCCESS
        return self._drop_if_idle(link, deadline, call, if_unused=True)

    def _drop_if_idle(self, link: Link, deadline: float, call: Call, *, if_unused: bool) -> LLMStatusCode:
        if not self._close_when_idle(link, deadline, lambda: call.dropped):
            return LLMStatusCode.LLM_LINK_BUSY
        try:
            return self._agree(link, deadline, call, if_unused=if_unused)
        except BaseException:
            self._reopen(link)
            raise

    def _unlink(self, cluster_id: int, deadline: float, call: Call, *, force: bool) -> LLMStatusCode:
        state = self._state
        link = state.links.get(cluster_id)
        if link is None:
            return LLMStatusCode.LLM_SUCCESS
        with state.lock:
            held = state.comm_holds[cluster_id] > 0
        if held:
            peer_of(link).by_clusters = False
            tell(link, Unlink(id=link.next_id(), time_left_ms=0, clusters_only=True))
            _LOG.info("the link to %s stays: a comm holds it until unlink(comm_id)", describe(link))
            return LLMStatusCode.LLM_SUCCESS
        if force:
            self._drop(link, "unlinked with force", tell=True)
            return LLMStatusCode.LLM_SUCCESS
        return self._drop_if_idle(link, deadline, call, if_unused=False)

    def _agree(self, link: Link, deadline: float, call: Call, *, if_unused: bool) -> LLMStatusCode:
        """Asks the peer to let go as well; whatever it says but busy or in use, the link goes."""
        peer = peer_of(link)
        left_s = max(0.0, deadline - time.monotonic())
        # The peer gets less than we wait, so that its "busy" is here before we take it for unreachable.
        question = Unlink(
            id=link.next_id(), time_left_ms=int(left_s * _PEERS_SHARE * 1000), if_unused=if_unused
        )
        code = LLMStatusCode.LLM_SUCCESS
        try:
            pending = link.call(question)
            call.on_cut(pending.give_up)
            answer = pending.wait(deadline + max(_ANSWER_S, left_s * (1 - _PEERS_SHARE))).message
        except TimeoutError:
            code = LLMStatusCode.LLM_TIMEOUT
        except LinkLost:
            if call.dropped:  # the peer may have let go by now, so this side does too
                self._drop(link, "unlinking was interrupted", tell=True)
            # Both sides may unlink at once: then each has told the other that it may go.
            return LLMStatusCode.LLM_SUCCESS if peer.unlinked else LLMStatusCode.LLM_UNLINK_FAILED
        else:
            said = code_of(answer.code) if isinstance(answer, Done) else code
            if said in _STAYS:
                self._reopen(link)
                return _STAYS[said]
            peer.unlinked = said == LLMStatusCode.LLM_SUCCESS
        self._drop(link, "unlinked", tell=False)
        return code

    def _drop(self, link: Link, reason: str, *, tell: bool) -> None:
        state = self._state
        state.links.drop(link, reason, tell=tell)
        with state.lock:  # what was cut off writes nothing more when this returns
            state.condition.wait_for(
                lambda: not state.flights.where(lambda f: f.uses(link) and not f.serving), LAST_BYTES_S
            )

    def _close_when_idle(
        self,
        link: Link,
        deadline: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Lets nothing new begin here, and waits for what is in flight; False when it is busy until then.

        What the peer begins meanwhile is not waited for: it is asked next, and knows. Also false when nobody waits
        for that any more (``gone``). After false the link is as it was.
        """
        state, peer, idle = self._state, peer_of(link), False
        with state.lock:
            peer.closing += 1
            try:
                idle = self._wait_idle(_InFlight(state, link), deadline, gone)
            finally:
                peer.closing -= not idle
        return idle

    def _wait_idle(self, in_flight: _InFlight, deadline: float, gone: Callable[[], bool]) -> bool:
        """Whether it has ended by then. The caller holds the lock."""
        while not gone():
            now = time.monotonic()
            if in_flight.has_ended(now):
                return True
            if now >= deadline:
                break
            self._state.condition.wait(min(deadline, in_flight.expires_at) - now)
        return False

    def _reopen(self, link: Link) -> None:
        """An unlink has ended, and the link stays."""
        with self._state.lock:
            peer_of(link).closing -= 1

    def unlink_asked(self, link: Link, message: Unlink) -> Question | None:
        """The peer wants to unlink: yes when we are idle, busy at its time-out; None: it has its answer."""
        if message.clusters_only:
            peer_of(link).by_clusters = False
            tell(link, Done(id=message.id, code=LLMStatusCode.LLM_SUCCESS))
            return None
        if message.if_unused and peer_of(link).by_clusters:
            text = "link_clusters was called there for this link; unlink_clusters ends it"
            tell(link, Done(id=message.id, code=LLMStatusCode.LLM_EXIST_LINK, text=text))
            return None
        return _Unlinking(self._state, link, message, self._reopen)


class _InFlight:
    """What is in flight on a link at one moment. The caller holds the lock."""

    def __init__(self, state: State, link: Link) -> None:
        self._flights, self._leases = state.flights, state.leases
        self._begun = set(state.flights.where(lambda f: f.uses(link)))
        self._held = state.leases.of_holder(link.token)

    def has_ended(self, now: float) -> bool:
        """Whether all of it has."""
        self._leases.expire(now)
        self._held = [lease for lease in self._held if self._leases.holds(lease)]
        return not self._held and not self._flights.where(self._begun.__contains__)

    @property
    def expires_at(self) -> float:
        """When the first of its leases ends by itself."""
        return min((lease.expires_at for lease in self._held), default=math.inf)


class _Unlinking(Question):
    """A peer's question whether the link may go. Until it is answered nothing new begins here."""

    def __init__(self, state: State, link: Link, message: Unlink, reopen: Callable[[Link], None]) -> None:
        super().__init__(link, message.id, message.time_left_ms)
        self._state = state
        self._reopen = reopen
        self._in_flight: _InFlight | None = None

    def is_over(self, now: float) -> bool:
        """See ``Question``."""
        if self._in_flight is None:
            peer_of(self.link).closing += 1
            self._in_flight = _InFlight(self._state, self.link)
        if self._in_flight.has_ended(now):
            peer_of(self.link).unlinked = True
            return True
        self.ends_at = min(self.deadline, self._in_flight.expires_at)
        return False

    def answer(self, code: LLMStatusCode, text: str = "") -> None:
        """See ``Question``."""
        if code != LLMStatusCode.LLM_SUCCESS:
            self._reopen(self.link)
        super().answer(code, text)


def _in_parallel(cluster_ids: Sequence[int], one: Callable[[int], LLMStatusCode]) -> list[LLMStatusCode]:
    codes = [LLMStatusCode.LLM_SUCCESS] * len(cluster_ids)

    def at(index: int) -> None:
        codes[index] = one(cluster_ids[index])

    others: list[threading.Thread] = []
    left = deque(range(len(cluster_ids)))
    with suppress(OutOfMemoryError):  # the system has no thread left: one after the other, here
        while len(left) > 1:
            others.append(start_thread(functools.partial(at, left[-1]), "llm-datadist-unlink"))
            left.pop()
    for index in left:
        at(index)
    for thread in others:
        thread.join()
    return codes


def _since_then(peer: Peer) -> Iterator[str]:
    """Why what was chosen is not in use (yet)."""
    for way in peer.ways:
        if refusal := way.refusal:
            yield f"{way.name}: not in use: {refusal}"


def _info(link: Link) -> LinkInfo:
    peer: Peer = peer_of(link)
    return LinkInfo(
        cluster_id=link.cluster_id,
        address=link.address,
        transport=peer.transport,
        reasons=(*peer.reasons, *_since_then(peer)),
        state=link.state,
        since=link.since,
        bytes_in=peer.bytes_in,
        bytes_out=peer.bytes_out,
    )
