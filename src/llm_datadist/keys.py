"""Keys: how a cache of a peer is named. Hashable values; all ids are uint64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from llm_datadist.checks import check_int64, check_uint32, check_uint64
from llm_datadist.status import ParamInvalidError

INVALID_ID = 2**64 - 1
"""A req_id or prefix_id that is not one."""
_MISSING: Any = object()


def _ids(kind: str, cluster_id: Any, others: dict[str, Any], **required: Any) -> int:
    """The cluster id under either of its names; refuses what is missing, double or unknown."""
    if "prompt_cluster_id" in others:
        if cluster_id is not _MISSING:
            raise ParamInvalidError(
                f"{kind} takes cluster_id or prompt_cluster_id, which are the same, not both"
            )
        cluster_id = others.pop("prompt_cluster_id")
    if others:
        raise ParamInvalidError(
            f"{kind} has no argument {sorted(others)[0]!r}; it takes cluster_id, {', '.join(required)}"
        )
    for name, value in {"cluster_id": cluster_id, **required}.items():
        if value is _MISSING:
            raise ParamInvalidError(f"{kind} needs {name}")
    return check_uint64("cluster_id", cluster_id)


@dataclass(frozen=True, slots=True, init=False)
class CacheKey:
    """A request or a prefix at a peer.

    Args:
        cluster_id: The peer (also by keyword ``prompt_cluster_id``); ignored when registering.
        req_id: The request; 2**64-1 for a prefix key or a placeholder.
        model_id: Tells models apart.
        prefix_id: The prefix; 2**64-1 for none.

    Raises:
        ParamInvalidError: An id is missing, or an unknown keyword was given.
    """

    cluster_id: int
    req_id: int
    model_id: int
    prefix_id: int

    @overload
    def __init__(
        self, cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID
    ) -> None: ...
    @overload
    def __init__(
        self, *, prompt_cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID
    ) -> None: ...
    def __init__(
        self,
        cluster_id: int = _MISSING,
        req_id: int = _MISSING,
        model_id: int = 0,
        prefix_id: int = INVALID_ID,
        **others: Any,
    ) -> None:
        cluster_id = _ids(
            "CacheKey", cluster_id, others, req_id=req_id, model_id=model_id, prefix_id=prefix_id
        )
        object.__setattr__(self, "cluster_id", cluster_id)
        object.__setattr__(self, "req_id", check_uint64("req_id", req_id))
        object.__setattr__(self, "model_id", check_uint64("model_id", model_id))
        object.__setattr__(self, "prefix_id", check_uint64("prefix_id", prefix_id))

    @property
    def prompt_cluster_id(self) -> int:
        """The same as ``cluster_id``."""
        return self.cluster_id


@dataclass(frozen=True, slots=True, init=False)
class CacheKeyByIdAndIndex:
    """A slot of a cache at a peer, by the cache's id there.

    Args:
        cluster_id: The peer (also by keyword ``prompt_cluster_id``).
        cache_id: The cache's id at the peer.
        batch_index: The slot.

    Raises:
        ParamInvalidError: An id is missing, or an unknown keyword was given.
    """

    cluster_id: int
    cache_id: int
    batch_index: int

    @overload
    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None: ...
    @overload
    def __init__(self, *, prompt_cluster_id: int, cache_id: int, batch_index: int = 0) -> None: ...
    def __init__(
        self,
        cluster_id: int = _MISSING,
        cache_id: int = _MISSING,
        batch_index: int = 0,
        **others: Any,
    ) -> None:
        cluster_id = _ids(
            "CacheKeyByIdAndIndex", cluster_id, others, cache_id=cache_id, batch_index=batch_index
        )
        object.__setattr__(self, "cluster_id", cluster_id)
        object.__setattr__(self, "cache_id", check_int64("cache_id", cache_id))
        object.__setattr__(self, "batch_index", check_uint32("batch_index", batch_index))

    @property
    def prompt_cluster_id(self) -> int:
        """The same as ``cluster_id``."""
        return self.cluster_id


@dataclass(frozen=True, slots=True, init=False)
class BlocksCacheKey:
    """The blocks cache of a model at a peer.

    Args:
        cluster_id: The peer (also by keyword ``prompt_cluster_id``); ignored when registering.
        model_id: Tells models apart.

    Raises:
        ParamInvalidError: The cluster id is missing, or an unknown keyword was given.
    """

    cluster_id: int
    model_id: int

    @overload
    def __init__(self, cluster_id: int, model_id: int = 0) -> None: ...
    @overload
    def __init__(self, *, prompt_cluster_id: int, model_id: int = 0) -> None: ...
    def __init__(self, cluster_id: int = _MISSING, model_id: int = 0, **others: Any) -> None:
        cluster_id = _ids("BlocksCacheKey", cluster_id, others, model_id=model_id)
        object.__setattr__(self, "cluster_id", cluster_id)
        object.__setattr__(self, "model_id", check_uint64("model_id", model_id))

    @property
    def prompt_cluster_id(self) -> int:
        """The same as ``cluster_id``."""
        return self.cluster_id
