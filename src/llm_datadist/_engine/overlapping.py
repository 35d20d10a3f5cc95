"""A transfer between two engines of one process must not read what it writes: the overlap check of the contract."""

from __future__ import annotations

from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.overlap import overlaps
from llm_datadist._core.segments import Extents
from llm_datadist._engine.state import State
from llm_datadist._link.link import Link
from llm_datadist.status import ParamInvalidError


def check_apart(state: State, link: Link, cache_id: int, part: CacheSlice, destination: Extents) -> None:
    """Nothing for a peer in another process. Its addresses are looked up here: over tcp none are sent.

    Args:
        state: Of the engine that owns the destination.
        link: To the owner of the source.
        cache_id: The source there.
        part: What is read of it.
        destination: What is written.

    Raises:
        ParamInvalidError: Source and destination share a byte.
    """
    owner = state.find_sibling(link.identity.instance)
    if owner is None:
        return
    with owner.lock:
        is_it = (
            link.token in owner.by_token
        )  # else that engine has no end of this link: the peer only says so
        record = owner.registry.get(cache_id) if is_it else None
    if record is None or part.first_tensor + part.tensor_count > record.layout.num_tensors:
        return  # the read itself finds that it is stale
    if overlaps(part.extents(record.addresses), destination):
        raise ParamInvalidError(
            f"the destination overlaps the source, cache {cache_id} of cluster {link.cluster_id} in this process; "
            "name other slots, blocks or memory"
        )
