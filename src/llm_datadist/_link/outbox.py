"""What waits to be sent on one connection, such that no interrupt of a sending thread sends a byte twice, or never.

Invariant: what is gone is the sum of what the sending calls have noted, each in the step in which it was sent: C
hands the result of one to the other. All else is worked out from that, as often as it takes. Guarded by the
connection's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from llm_datadist._core import limits
from llm_datadist._wire.framing import Buffer

CHUNKS_PER_CALL = 256  # under IOV_MAX (1024)


class Outbox:
    """Chunks in the order of their sending, each with the place in the stream where it ends.

    Args:
        all_nbytes: What waits on all connections.

    Attributes:
        about: Bytes that wait, as they were when it was last sent from or added to: for a look without the lock.
    """

    def __init__(self, all_nbytes: Callable[[], int] = lambda: 0) -> None:
        self._all_nbytes = all_nbytes
        self._owed = 0  # of what waits, answers: at most
        self.about = 0
        self._chunks: deque[tuple[int, Buffer]] = deque()
        self._gone: tuple[int, deque[int]] = (0, deque())  # bytes until then, and of each call since

    def __bool__(self) -> bool:
        return self.nbytes > 0

    @property
    def nbytes(self) -> int:
        """That wait."""
        return self._chunks[-1][0] - self._at() if self._chunks else 0

    @property
    def owes(self) -> bool:
        """Whether the peer leaves so many answers unread that it should get no more of them."""
        return self._owed > limits.OWED_NBYTES

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more may wait."""
        wanted = self.nbytes + nbytes
        if wanted <= limits.OUTBOX_SURE_NBYTES:
            return True
        return wanted <= limits.OUTBOX_NBYTES and self._all_nbytes() + nbytes <= limits.OUTBOXES_NBYTES

    def put(self, chunks: Sequence[Buffer], *, owed: bool = False) -> None:
        """Adds a message; ``owed``: an answer."""
        end = self._chunks[-1][0] if self._chunks else self._at()
        placed = []
        for chunk in chunks:
            end += len(chunk)
            placed.append((end, chunk))
        self._chunks.extend(placed)
        self.about = self.nbytes
        if owed:
            self._owed += sum(map(len, chunks))

    def first(self, count: int | None = CHUNKS_PER_CALL) -> list[Buffer]:
        """What one call may send: so many chunks, of the first what is left of it; None: all."""
        at = self._at()
        return [
            chunk if end - len(chunk) >= at else memoryview(chunk)[at - end :]
            for end, chunk in islice(self._chunks, count)
            if end > at
        ]

    def joined(self) -> bytes:
        """All of it."""
        return b"".join(self.first(None))

    def send(self, call: Callable[..., int], *arguments: object) -> None:
        """Makes a call, of C, that sends from the beginning; it returns how much that was, or a negative number."""
        self._gone[1].extend(map(call, *((argument,) for argument in arguments)))

    @property
    def result(self) -> int:
        """Of the latest call since ``forget_sent``."""
        return self._gone[1][-1]

    def forget_sent(self) -> int:
        """Drops what is gone; how much that was since the last time."""
        before, at = self._gone[0], self._at()
        while self._chunks and self._chunks[0][0] <= at:
            self._chunks.popleft()
        self._gone = (at, deque())
        self.about = self.nbytes
        self._owed = min(self._owed, self.about)
        return at - before

    def clear(self) -> None:
        """Forgets it all."""
        self._chunks.clear()
        self.about = self._owed = 0

    def _at(self) -> int:
        before, since = self._gone
        return before + sum(done for done in since if done > 0)
