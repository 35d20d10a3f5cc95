"""What must be true of a destination before the first byte moves: it can be written, and is not what is read.

Looked at each time, by the engine that owns it: memory may have been unmapped or protected since it was registered.
"""

from __future__ import annotations

from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import Record
from llm_datadist._core.segments import Extents
from llm_datadist._engine.overlapping import check_apart
from llm_datadist._engine.state import State
from llm_datadist._link.link import Link
from llm_datadist.status import ParamInvalidError


def check_destination(
    state: State, link: Link, cache_id: int, part: CacheSlice, target: CacheSlice, destination: Extents,
    record: Record | None = None,
) -> None:  # fmt: skip
    """Of a transfer from a peer.

    Args:
        state: Of the engine that owns the destination.
        link: To the owner of the source.
        cache_id: The source there.
        part: What is read of it.
        target: What is written.
        destination: The memory of that.
        record: The cache of that, if it is one.

    Raises:
        ParamInvalidError: It cannot be written, or shares a byte with the source.
    """
    check_apart(state, link, cache_id, part, destination)
    if record is None or not state.memory_of(record).all_writable():
        check_writable(state, destination, target.first_tensor)


def check_writable(state: State, destination: Extents, first_tensor: int = 0) -> None:
    """``first_tensor``: the number of its first one in its cache.

    Raises:
        ParamInvalidError: Not all of it is mapped and writable; the text names the tensor and its address.
    """
    found = state.writability.first_unwritable(destination)
    if found is not None:
        row, address = found
        raise ParamInvalidError(
            f"destination memory cannot be written: tensor {first_tensor + row} at {int(destination.bases[row]):#x} is "
            f"not mapped, or not writable, at {address:#x}; register writable memory, and unregister it before its "
            "mapping changes"
        )
