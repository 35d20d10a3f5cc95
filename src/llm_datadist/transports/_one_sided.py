"""One read by address: a plan moved by the caller and its movers, whatever moves the single pieces.

Strategy: a small plan is moved by the caller alone; a large one is claimed piece by piece, so that a late
mover takes less and a missing one nothing. While threads of this process wait for the GIL (``_waits``), pieces
are as large as a call may be, for fewer threads or the caller alone. How a piece is moved, a subclass says.
Invariants: deadline, cancel and the owner's life are looked at between steps and after the last one; the
crew is dismissed (no thread may enter, all that have entered have left) before ``wait`` ends in any way.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref

from llm_datadist._core.segments import U64, Extents, Segments
from llm_datadist._waiting import Changes, guard
from llm_datadist.transports import _libc
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, FaultKind, Progress

CALL_NBYTES = 16 << 20  # a call cannot be cancelled: at most a few ms of one core
SPLIT_NBYTES = 2 << 20  # below it, waking a thread costs more than it brings
_CLAIM_NBYTES = 1 << 20


class Owner:
    """Whose memory is read, as long as a channel and its reads need it."""

    __slots__ = ("_closed", "_lock", "_users")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[weakref.ref[object]] = set()  # one whose ``let_go`` was interrupted dies
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the channel was closed."""
        return self._closed

    def hold(self) -> Hold:
        """What keeps everything in place, once it is taken."""
        return Hold(self)

    def keep(self, user: object) -> bool:
        """Everything stays in place while ``user`` lives, or until ``let_go``; False when the channel is closed."""
        # Entered, then it is looked at; ``close`` does both the other way round, so that one of the two sees the other.
        self._users.add(weakref.ref(user))
        if self._closed:
            self.let_go(user)
            return False
        return True

    def let_go(self, user: object) -> None:
        """The end of a ``keep``. Idempotent."""
        self._users.discard(weakref.ref(user))
        if self._closed:
            with self._lock:
                self._free_unused()

    def close(self) -> None:
        """Stops what runs; what is held goes with its last holder. Idempotent."""
        with self._lock:
            self._closed = True
            self._free_unused()

    def gone(self) -> bool:
        """Whether its process has ended, or withdrawn from us. Only while held."""
        raise NotImplementedError

    def lost(self) -> Fault:
        """What a read ends with then."""
        raise NotImplementedError

    def _free(self) -> None:
        """Gives everything back. Called under the lock, perhaps more than once."""
        raise NotImplementedError

    def _free_unused(self) -> None:
        if self._closed and not any(user() is not None for user in list(self._users)):
            self._free()


class Hold:
    """Keeps an owner's memory in place: ``with owner.hold() as held``, where False means that it is closed.

    An interrupt may come between any two steps, also of a ``finally``: a hold that is not dropped ends as an object,
    which the owner knows by a weak reference. (A ``__del__`` would swallow interrupts.)
    """

    __slots__ = ("__weakref__", "_owner")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def take(self) -> bool:
        """The beginning; False when the channel is closed."""
        return self._owner.keep(self)

    def drop(self) -> None:
        """The end. Idempotent."""
        self._owner.let_go(self)

    def __enter__(self) -> bool:
        return self.take()

    def __exit__(self, *_: object) -> None:
        self.drop()


class Crew:
    """Who is moving bytes of one read besides its caller."""

    def __init__(self) -> None:
        self._lock = guard(self)
        self._changes = Changes(self._lock)
        self._inside = 0
        self._dismissed = False

    def enter(self) -> bool:
        """Comes in, unless it has been dismissed."""
        with self._lock:
            if not self._dismissed:
                self._inside += 1
            return not self._dismissed

    def leave(self) -> None:
        """The end of an ``enter``."""
        with self._lock:
            self._inside -= 1
        self._changes.notify_all()

    def dismiss(self) -> None:
        """Nobody enters any more; returns when all have left, whatever is raised into the wait."""
        raised: BaseException | None = None
        while True:
            try:
                if self._is_left():
                    break
            except BaseException as exc:  # a signal handler's, as a second Ctrl-C: after the join
                raised = exc
        if raised is not None:
            raise raised

    def _is_left(self) -> bool:
        """Dismisses, and sleeps a moment if somebody is inside."""
        with self._lock:
            self._dismissed = True
            if not self._inside:
                return True
            ticket = self._changes.ticket()
        ticket.sleep(threading.TIMEOUT_MAX)
        return False


class OneSidedRead:
    """A read under way."""

    __slots__ = (
        "_cancelled", "_crew", "_cursor", "_deadline", "_destination", "_done", "_fault", "_grain", "_lock",
        "_movers", "_owner", "_share", "_source",
    )  # fmt: skip

    def __init__(self, owner: Owner, movers: Movers, plan: Segments) -> None:
        source, destination = plan.source, plan.destination
        if not isinstance(source, Extents):
            raise TypeError("a one-sided transport reads by address; this plan has a selector")
        if source.nbytes != destination.nbytes:
            raise ValueError(f"the plan reads {source.nbytes} bytes into {destination.nbytes}")
        self._owner = owner
        self._movers = movers
        self._source = source
        self._destination = destination
        self._grain = 1  # pieces begin at multiples of it
        self._cancelled: str | None = None
        self._fault: Fault | None = None

    def cancel(self, reason: str = "") -> None:
        """Ends the read after the steps in progress."""
        self._cancelled = reason or "cancelled"

    def wait(self, *, deadline: float) -> Progress:
        """Moves the bytes. To be called once."""
        nbytes = self._destination.nbytes
        if not nbytes:
            return Progress(0)
        with self._owner.hold() as held:
            if not held:
                return Progress(0, Fault(FaultKind.CANCELLED, "the channel is closed"))
            self._deadline = deadline
            at = self._begin(nbytes)
            if at < nbytes and self._fault is None:
                helpers = self._count_helpers(nbytes)
                at = self._move_together(nbytes, helpers) if helpers else self._move(at, nbytes)
            if self._fault is None and self._owner.gone():
                self._fault = self._owner.lost()
            return Progress(at, self._fault)

    # ---- what a subclass says --------------------------------------------------------------------

    def _begin(self, nbytes: int) -> int:
        """Prepares, and takes the short way for a plan that is small enough; returns how far it came."""
        raise NotImplementedError

    def _move(self, at: int, stop: int) -> int:
        """Moves [at, stop) of the stream; returns where it ended: at stop, or before with a fault noted."""
        raise NotImplementedError

    # ---- for subclasses --------------------------------------------------------------------------

    def _one_run(self) -> tuple[int, int] | None:
        """(there, here) of a small plan of one run on each side, moved at once; None for all others."""
        source, destination = self._source, self._destination
        runs = max(len(source.bases) * len(source.offsets), len(destination.bases) * len(destination.offsets))
        if runs != 1 or destination.nbytes > SPLIT_NBYTES:
            return None
        there = int(source.bases[0]) + int(source.offsets[0])
        return there, int(destination.bases[0]) + int(destination.offsets[0])

    def _move_by_kernel(self, pid: int, at: int, stop: int) -> int:
        """``_move`` by ``process_vm_readv``, for which a bad address is an answer.

        Both sides are expanded on their own and handed to one call; the shorter one decides how far it
        goes, and whatever the kernel really copied is where the next call starts, to the byte.
        """
        max_runs = _libc.IOV_MAX
        while at < stop and not self._must_stop():
            room = min(CALL_NBYTES, stop - at)
            source, _ = self._source.take_pairs(at, room, max_runs)
            destination, _ = self._destination.take_pairs(at, room, max_runs)
            done = self._call(pid, destination, source, room)
            if done > 0:
                at += done
            elif done == -errno.EFAULT and max_runs > 1:
                max_runs = 1  # the call may have failed for a later range: find the very byte
            elif done != -errno.EINTR:
                self._note(self._fault_of(pid, -done, int(source[0, 0]), int(destination[0, 0])))
        return at

    def _call(self, pid: int, destination: U64, source: U64, nbytes: int) -> int:
        if nbytes < _CLAIM_NBYTES:  # too short to tell anything
            return _libc.read_pairs(pid, destination, source)
        return self._movers.waits.watch(_libc.read_pairs, pid, destination, source)

    def _must_stop(self) -> bool:
        """Between steps: whether there is a fault, by now, of whatever kind."""
        if self._fault is not None:
            return True
        if self._cancelled is not None or self._owner.closed:
            self._note(Fault(FaultKind.CANCELLED, self._cancelled or "the channel was closed"))
        elif time.monotonic() >= self._deadline:
            self._note(Fault(FaultKind.TIMEOUT, "the time ran out while bytes were being read"))
        elif self._owner.gone():
            self._note(self._owner.lost())
        return self._fault is not None

    def _note(self, fault: Fault) -> None:
        # Two threads at once: either reason is true, so the last one may win.
        if self._fault is None:
            self._fault = fault

    def _fault_of(self, pid: int, number: int, source: int, destination: int) -> Fault:
        """What it means that the kernel copied nothing from ``source`` of ``pid`` to ``destination``."""
        if number == errno.ESRCH or self._owner.gone():
            return self._owner.lost()
        cause = OSError(number, os.strerror(number))
        if number == errno.EFAULT or number == 0:
            if not _libc.can_write_byte(destination):
                return unwritable(destination, cause)
            text = f"address {source:#x} of process {pid} cannot be read"
            return Fault(FaultKind.SOURCE, text, cause=cause)
        text = f"process_vm_readv from process {pid} failed: {os.strerror(number)}"
        return Fault(FaultKind.CHANNEL, text, cause=cause)

    # ---- together --------------------------------------------------------------------------------

    def _moves_together(self, nbytes: int) -> bool:
        """Whether movers help with a plan of so many bytes, as things are now."""
        return self._count_helpers(nbytes) > 0

    def _count_helpers(self, nbytes: int) -> int:
        if nbytes <= SPLIT_NBYTES:
            return 0
        return max(0, min(self._movers.count, nbytes // self._least_claim() - 1))

    def _least_claim(self) -> int:
        return CALL_NBYTES if self._movers.waits.held_up(time.monotonic()) else _CLAIM_NBYTES

    def _move_together(self, nbytes: int, helpers: int) -> int:
        """The caller and so many threads, if they are free; returns the bytes that all of them moved."""
        self._crew = Crew()
        self._lock = guard(self._crew)
        self._cursor = self._done = 0
        self._share = helpers + 1
        try:
            self._movers.offer(self._help, helpers)
            self._move_claims(nbytes)
            self._dismiss()
        except BaseException as exc:
            self._note(Fault(FaultKind.CANCELLED, "interrupted", cause=exc))
            self._dismiss()
            raise
        return self._done

    def _dismiss(self) -> None:
        self._movers.withdraw(self._help)
        self._crew.dismiss()

    def _help(self) -> None:
        """A mover's part."""
        if not self._crew.enter():
            return
        try:
            self._move_claims(self._destination.nbytes)
        except Exception as exc:
            self._note(Fault(FaultKind.CHANNEL, f"a mover thread failed: {exc}", cause=exc))
        finally:
            self._crew.leave()

    def _move_claims(self, nbytes: int) -> None:
        while self._fault is None:
            with self._lock:
                at = self._cursor
                left = nbytes - at
                claim = min(CALL_NBYTES, max(self._least_claim(), left // self._share))
                stop = at + min(left, claim - claim % self._grain)
                self._cursor = stop
            if at == stop:
                return
            end = self._move(at, stop)
            with self._lock:
                self._done += end - at


def unwritable(address: int, cause: BaseException | None = None) -> Fault:
    """Why a read cannot go on at ``address`` of ours."""
    return Fault(
        FaultKind.DESTINATION, f"address {address:#x} of this process cannot be written", cause=cause
    )
