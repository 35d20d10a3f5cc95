"""Notifications: their limits, and the queue that holds what peers have sent. Pure; guarded by its owner.

A notice that has arrived is parked until its sender has decided about the call that it belongs to; parked
ones count against the capacity, so one that was accepted always has its place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from llm_datadist._core import limits
from llm_datadist.checks import check_isinstance
from llm_datadist.clusters import Notify
from llm_datadist.status import OutOfMemoryError, ParamInvalidError


@dataclass(frozen=True, slots=True)
class Notice:
    """What is to be said to a peer."""

    name: str
    message: bytes


def checked_notice(name_arg: str, name: Any, message_arg: str, message: Any) -> Notice:
    """A notice from a caller's arguments, which the texts call ``name_arg`` and ``message_arg``.

    Raises:
        TypeError: Not str and bytes.
        ParamInvalidError: Too long, or a name without UTF-8 form.
    """
    check_isinstance(name_arg, name, str)
    check_isinstance(message_arg, message, bytes)
    check_notice(Notice(name, message), name_arg, message_arg)
    return Notice(name, message)


def check_notice(notice: Notice, name_arg: str = "name", message_arg: str = "message") -> None:
    """Holds a notice to the limits.

    Raises:
        ParamInvalidError: Too long, or a name without UTF-8 form.
    """
    try:
        name_nbytes = len(notice.name.encode())
    except UnicodeEncodeError as exc:
        raise ParamInvalidError(
            f"{name_arg} is {notice.name!r:.200}; it must be text that UTF-8 can encode"
        ) from exc
    for argument, nbytes in ((name_arg, name_nbytes), (message_arg, len(notice.message))):
        if nbytes > limits.NOTIFY_NBYTES:
            raise ParamInvalidError(
                f"{argument} has {nbytes} bytes; at most {limits.NOTIFY_NBYTES} are allowed, move more with a pull or "
                "push"
            )


class NoticeQueue:
    """What peers have said and nobody has fetched yet, in the order of its coming.

    A peer that is the only one may fill it. Of several each may hold as many as are free: so there is always room
    for the others, whoever floods it.
    """

    def __init__(self, capacity: int = limits.NOTIFICATIONS) -> None:
        self._capacity = capacity
        self._parked: dict[Hashable, Notify] = {}
        self._waiting: deque[Notify] = deque()
        self._held: Counter[int] = Counter()  # by cluster

    def check_room(self, cluster_id: int, *, alone: bool) -> None:
        """Whether one more of that cluster fits; ``alone``: no other is linked.

        Raises:
            OutOfMemoryError: It is full, or that cluster's share is.
        """
        held = len(self._parked) + len(self._waiting)
        if held >= self._capacity:
            raise OutOfMemoryError(
                f"the queue of notifications holds {held}, which is all it may; its owner must call get_notifies"
            )
        mine = self._held[cluster_id]
        if not alone and mine >= self._capacity - held:
            raise OutOfMemoryError(
                f"the queue of notifications holds {held}, {mine} of them of cluster {cluster_id}, and leaves the rest "
                "to others; its owner must call get_notifies"
            )

    def park(self, ticket: Hashable, notify: Notify, *, alone: bool = True) -> None:
        """Holds one back until ``admit``.

        Raises:
            OutOfMemoryError: See ``check_room``.
        """
        self.check_room(notify.cluster_id, alone=alone)
        self._held[notify.cluster_id] += 1
        self._parked[ticket] = notify

    def admit(self, ticket: Hashable) -> bool:
        """Enters a parked one; False when it was withdrawn."""
        notify = self._parked.pop(ticket, None)
        if notify is None:
            return False
        self._waiting.append(notify)
        return True

    def withdraw(self, ticket: Hashable) -> bool:
        """Forgets a parked one; False when it is not parked."""
        notify = self._parked.pop(ticket, None)
        if notify is None:
            return False
        self._held[notify.cluster_id] -= 1
        return True

    def take(self) -> list[Notify]:
        """All that wait; they are the caller's now."""
        taken = list(self._waiting)
        self._waiting.clear()
        self._held = Counter(notify.cluster_id for notify in self._parked.values())
        return taken

    def put_back(self, taken: list[Notify]) -> None:
        """Its caller has not got what was taken: the next one has it, before what has come since."""
        self._waiting.extendleft(reversed(taken))
        self._held.update(notify.cluster_id for notify in taken)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._waiting
