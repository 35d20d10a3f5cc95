"""Two engines in one process, one of which has pulled a block of the other as if it were another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist._engine.routes import Route
from llm_datadist._engine.short_ways import ByAddress, ByAsking
from llm_datadist._engine.state import Peer, State, peer_of
from tests.support.engines import Engines
from tests.support.memory import FILL
from tests.support.pair import SUCCESS
from tests.support.world import wait_until

KEY = BlocksCacheKey(1, 0)


class Warm(Engines):
    """Cluster 1 owns blocks of ones; cluster 2 has pulled one of them, as if from another process."""

    def __init__(self, backend: str, mode: str = "B") -> None:
        super().__init__(mode, backend)
        self.owner, self.reader = self.make(1), self.make(2)
        self.state.find_sibling = lambda instance: None
        assert self.link(self.reader, 1, self.owner) == SUCCESS
        self.source, _ = self.blocks(self.owner, 1, model_id=0)
        self.cache, self.memory = self.blocks(self.reader)
        assert wait_until(lambda: mode == "A" or self.peer.table.version > 0, 10)
        self.pull()

    @property
    def engine(self) -> Any:
        return self.reader._engine

    @property
    def state(self) -> State:
        return self.engine._state  # type: ignore[no-any-return]

    @property
    def peer(self) -> Peer:
        link = self.state.links.get(1)
        assert link is not None
        return peer_of(link)

    @property
    def route(self) -> Route:
        route = self.peer.routes.find(0, self.cache.cache_id)
        assert route is not None
        return route

    def pull(self, **more: Any) -> None:
        self.reader.cache_manager.pull_blocks(KEY, self.cache, [1], [2], **more)

    def again(
        self,
        src: Any = (1,),
        dst: Any = (2,),
        key: Any = KEY,
        cache: Any = None,
        started: float | None = None,
    ) -> bool:
        """Whether the short way is taken; tuples stand for lists."""
        self.memory[:] = FILL
        src, dst = (list(blocks) if type(blocks) is tuple else blocks for blocks in (src, dst))
        began = time.monotonic() if started is None else started
        done: bool = self.engine.pull_again(key, cache or self.cache, src, dst, began)
        assert not self.state.flights.where(lambda _: True)
        return done

    def arrived(self) -> bool:
        return bool((self.memory[:, 2] == 1).all() and (self.memory[:, [0, 1, 3]] == FILL).all())

    def untouched(self) -> bool:
        return bool((self.memory == FILL).all())

    def code(self) -> LLMStatusCode:
        """What a pull of the same block ends with."""
        try:
            self.pull()
        except LLMException as exc:
            return exc.status_code
        return SUCCESS

    def put_back(self, route: Route) -> None:
        """As if nobody had dropped it."""
        self.peer.routes.keep(route)

    @contextmanager
    def meanwhile(self, event: Callable[[], object], *, done: bool | None = None) -> Iterator[None]:
        """``event`` happens in the middle of reads, which then end as they would, or with ``done``."""
        route, short = self.route, self.route.short
        prepared: Any = short.rows if isinstance(short, ByAddress) else cast(ByAsking, short).units

        class Observed:
            def read(self, there: int, here: int, **how: Any) -> bool:
                result = prepared.read(there, here, **how)
                event()
                return bool(result if done is None else done)

        part = "rows" if isinstance(short, ByAddress) else "units"
        self.put_back(
            msgspec.structs.replace(route, short=msgspec.structs.replace(short, **{part: Observed()}))
        )
        yield
        self.put_back(route)
