"""What callers say of memory of theirs, held against what is mapped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_datadist._core.layout import Layout
from llm_datadist._core.segments import U64
from llm_datadist.caches import MemInfo
from llm_datadist.devices import cpu
from llm_datadist.enums import Memtype
from llm_datadist.status import ParamInvalidError


def checked_addresses(addrs: Sequence[int], layout: Layout) -> U64:
    """The addresses of a cache's tensors.

    Raises:
        ParamInvalidError: Wrong in number, 0, or not mapped and readable.
    """
    if layout.num_tensors < 1:
        raise ParamInvalidError("CacheDesc.num_tensors is 0; a cache needs at least one tensor")
    if len(addrs) != layout.num_tensors:
        raise ParamInvalidError(
            f"{len(addrs)} addresses for {layout.num_tensors} tensors; there must be one for each"
        )
    addresses = np.array(addrs, dtype=np.uint64)
    if not addresses.all():
        raise ParamInvalidError(f"addrs[{int(np.argmin(addresses))}] is 0; pass the address of mapped memory")
    check_mapped("addrs", addresses, layout)
    return addresses


def check_mapped(name: str, addresses: U64, layout: Layout) -> None:
    """Raises ParamInvalidError where a tensor is not mapped and readable."""
    bad = cpu.first_unmapped(addresses, layout.tensor_nbytes)
    if bad is not None:
        start = int(addresses[bad])
        raise ParamInvalidError(
            f"{name}[{bad}] is {start:#x}: the {layout.tensor_nbytes} bytes up to {start + layout.tensor_nbytes:#x} "
            "are not all mapped and readable; check the address and the shape of the CacheDesc"
        )


def checked_ranges(ranges: Sequence[MemInfo]) -> tuple[U64, U64]:
    """Where each range begins and ends.

    Raises:
        ParamInvalidError: Not device memory, or not mapped.
    """
    for at, info in enumerate(ranges):
        if info.mem_type is not Memtype.MEM_TYPE_DEVICE:
            raise ParamInvalidError(
                f"mem_infos[{at}] is {info.mem_type.name}; only device memory is remapped"
            )
        if not info.addr or info.size <= 0:
            raise ParamInvalidError(
                f"mem_infos[{at}] has addr {info.addr:#x} and size {info.size}; both must be greater than 0"
            )
        if cpu.first_unmapped([info.addr], info.size) is not None:
            raise ParamInvalidError(
                f"mem_infos[{at}]: the {info.size} bytes at {info.addr:#x} are not all mapped and readable; "
                "map them first"
            )
    starts = np.array([info.addr for info in ranges], dtype=np.uint64)
    return starts, starts + np.array([info.size for info in ranges], dtype=np.uint64)
