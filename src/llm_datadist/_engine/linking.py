"""Links as callers see them: link, unlink, check, list.

``unlink`` drops a link only when nothing is in flight on either side, or by force. Who asked drops the
connection; the peer marks its side as unlinked and sees it go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from llm_datadist._engine.state import Peer, State, describe, peer_of, tell
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._link.seam import Address, Target
from llm_datadist._wire.messages import Done, Unlink
from llm_datadist.clusters import LinkInfo
from llm_datadist.status import LinkFailedError, LLMStatusCode, TransferTimeoutError, code_of

_LAST_BYTES_S = 5.0  # after a cut: a mover finishes at most one call of 16 MiB


class Linking:
    """Link operations of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    def link(self, targets: Sequence[tuple[int, tuple[str, int]]], timeout_ms: int) -> list[LLMStatusCode]:
        """Dials all in parallel; one code per target."""
        wanted = [Target(cluster_id, Address(*address)) for cluster_id, address in targets]
        return self._state.links.dial(wanted, timeout_ms / 1000)

    def check(self, cluster_id: int) -> None:
        """Returns when the link answers a ping within sync_kv_timeout.

        Raises:
            NotLinkedError: No link.
            LinkFailedError: It went down.
            TransferTimeoutError: LLM_TIMEOUT.
        """
        state = self._state
        started = time.monotonic()
        link = state.link_to(cluster_id)
        try:
            state.links.ping(link, started + state.timeout_s)
        except LinkLost as exc:
            raise LinkFailedError(
                f"{describe(link)}: the link went down: {exc}; call link_clusters again"
            ) from None
        except TimeoutError:
            elapsed = (time.monotonic() - started) * 1000
            raise TransferTimeoutError(
                f"{describe(link)} did not answer a ping within {elapsed:.0f} ms; it is stopped, overloaded or cut off"
            ) from None

    def links(self) -> list[LinkInfo]:
        """All links that are up or silent."""
        return [_info(link) for link in self._state.links.links() if not peer_of(link).unlinked]

    # ---- unlinking --------------------------------------------------------------------------------------------

    def unlink(self, cluster_ids: Sequence[int], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """Drops links, in parallel; one code per cluster."""
        deadline = time.monotonic() + timeout_ms / 1000
        codes = [LLMStatusCode.LLM_SUCCESS] * len(cluster_ids)

        def one(at: int) -> None:
            codes[at] = self._unlink(cluster_ids[at], deadline, force=force)

        others = [threading.Thread(target=one, args=(at,), daemon=True) for at in range(1, len(cluster_ids))]
        for thread in others:
            thread.start()
        if cluster_ids:
            one(0)
        for thread in others:
            thread.join()
        return codes

    def _unlink(self, cluster_id: int, deadline: float, *, force: bool) -> LLMStatusCode:
        link = self._state.links.get(cluster_id)
        if link is None:
            return LLMStatusCode.LLM_SUCCESS
        if force:
            self._drop(link, "unlinked with force", tell=True)
            return LLMStatusCode.LLM_SUCCESS
        if not self._close_when_idle(link, deadline):
            return LLMStatusCode.LLM_LINK_BUSY
        return self._agree(link, deadline)

    def _agree(self, link: Link, deadline: float) -> LLMStatusCode:
        """Asks the peer to let go as well; whatever it says but busy, the link goes."""
        peer = peer_of(link)
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        code = LLMStatusCode.LLM_SUCCESS
        try:
            answer = link.call(Unlink(id=link.next_id(), time_left_ms=left_ms)).wait(deadline).message
        except TimeoutError:
            code = LLMStatusCode.LLM_TIMEOUT
        except LinkLost:
            # Both sides may unlink at once: then each has told the other that it may go.
            return LLMStatusCode.LLM_SUCCESS if peer.unlinked else LLMStatusCode.LLM_UNLINK_FAILED
        else:
            if isinstance(answer, Done) and code_of(answer.code) == LLMStatusCode.LLM_LINK_BUSY:
                peer.closing = False
                return LLMStatusCode.LLM_LINK_BUSY
        self._drop(link, "unlinked", tell=False)
        return code

    def _drop(self, link: Link, reason: str, *, tell: bool) -> None:
        state = self._state
        state.links.drop(link, reason, tell=tell)
        with state.condition:  # what was cut off writes nothing more when this returns
            state.condition.wait_for(
                lambda: not state.flights.where(lambda f: f.uses(link) and not f.serving), _LAST_BYTES_S
            )

    def _close_when_idle(self, link: Link, deadline: float) -> bool:
        """Marks the link as closing once nothing is in flight on it; False when it is busy until then."""
        state = self._state
        with state.condition:
            while True:
                now = time.monotonic()
                state.leases.expire(now)
                leases = state.leases.of_holder(link.token)
                if not leases and not state.flights.where(lambda f: f.uses(link)):
                    peer_of(link).closing = True
                    return True
                if now >= deadline:
                    return False
                state.condition.wait(min([deadline, *(x.expires_at for x in leases)]) - now)

    def unlink_asked(self, link: Link, message: Unlink) -> None:
        """The peer wants to unlink: yes when we are idle, busy at its time-out. Not for the control thread."""
        idle = self._close_when_idle(link, time.monotonic() + max(0, message.time_left_ms) / 1000)
        peer = peer_of(link)
        peer.unlinked = idle
        code = LLMStatusCode.LLM_SUCCESS if idle else LLMStatusCode.LLM_LINK_BUSY
        tell(link, Done(id=message.id, code=code, text="" if idle else "transfers are in flight"))


def _info(link: Link) -> LinkInfo:
    peer: Peer = peer_of(link)
    return LinkInfo(
        cluster_id=link.cluster_id,
        address=link.address,
        transport=peer.transport,
        reasons=peer.reasons,
        state=link.state,
        since=link.since,
        bytes_in=peer.bytes_in,
        bytes_out=peer.bytes_out,
    )
