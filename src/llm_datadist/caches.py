"""Descriptions of caches, and handles to registered ones; the keys by which peers find them are in ``keys``.

``CacheDesc`` can be changed with ``update_dim`` until it is used, which is why
an engine keeps a copy. A handle remembers which life of an engine made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from llm_datadist.checks import (
    check_int32,
    check_int64,
    check_isinstance,
    check_list_uint64,
    check_uint32,
    check_uint64,
)
from llm_datadist.data_type import DataType, dtype_nbytes
from llm_datadist.enums import Memtype, Placement
from llm_datadist.status import ParamInvalidError

MAX_DIMS = 31
_INT64_MAX = 2**63 - 1
_NOT_REGISTERED = -1


class CacheDesc:
    """What a cache is made of: ``num_tensors`` tensors of one shape and element type.

    Args:
        num_tensors: Number of tensors, uint32.
        shape: Shape of each tensor, 1 to 31 dims. Dim 0 is the batch or block dimension of transfers.
        data_type: Element type.
        placement: Where the memory lies.
        batch_dim_index: Only moves the property ``batch_size``.
        seq_len_dim_index: -1 or a dim; informative.
        kv_tensor_format: Informative.

    Raises:
        TypeError: An argument of a wrong type.
        ValueError: An integer outside its range.
        ParamInvalidError: Wrong number of dims, or a dim index outside the shape.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = check_uint32("num_tensors", num_tensors)
        self._shape: list[int] | tuple[int, ...] = _checked_shape(shape)
        self._data_type: DataType = check_isinstance("data_type", data_type, DataType)
        self._placement: Placement = check_isinstance("placement", placement, Placement)
        self._batch_dim_index = self._dim("batch_dim_index", batch_dim_index, 0)
        self._seq_len_dim_index = self._dim("seq_len_dim_index", seq_len_dim_index, -1)
        self._kv_tensor_format: str | None = check_isinstance("kv_tensor_format", kv_tensor_format, str, True)

    def _dim(self, name: str, index: int, lowest: int) -> int:
        index = check_int32(name, index)
        if lowest <= index < len(self._shape):
            return index
        raise ParamInvalidError(
            f"{name} is {index}; it must lie in [{lowest}, {len(self._shape)}) with shape {self._shape}"
        )

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """Shape of each tensor: a new list or a tuple, as it was given."""
        return list(self._shape) if isinstance(self._shape, list) else self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Where the memory lies."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Index of the dim that ``batch_size`` reads."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """Size of the dim ``batch_dim``."""
        return self._shape[self._batch_dim_index]

    @property
    def seq_len_dim_index(self) -> int:
        """Index of the sequence dim, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """Name of the tensor format, or None."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        return prod(self._shape) * dtype_nbytes(self._data_type)

    def update_dim(self, index: int, value: int) -> None:
        """Sets one dim of the shape. Caches made before keep theirs.

        Raises:
            ParamInvalidError: ``index`` outside the shape.
        """
        index = self._dim("index", index, 0)
        shape = list(self._shape)
        shape[index] = check_int64("value", value)
        self._shape = type(self._shape)(shape)

    def check_shape(self) -> None:
        """Refuses what cannot be registered: a dim that is not positive, a tensor beyond int64 bytes.

        Raises:
            ParamInvalidError: With the shape and the dim.
        """
        for i, dim in enumerate(self._shape):
            if dim <= 0:
                raise ParamInvalidError(
                    f"shape[{i}] of {self._shape} is {dim}; every dim must be greater than 0"
                )
        if self.size > _INT64_MAX:
            raise ParamInvalidError(
                f"a tensor of shape {self._shape} has {self.size} bytes; at most {_INT64_MAX} are possible"
            )

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement!r}, batch_dim_index={self._batch_dim_index}, "
            f"seq_len_dim_index={self._seq_len_dim_index}, kv_tensor_format={self._kv_tensor_format!r})"
        )


def _checked_shape(shape: Any) -> list[int] | tuple[int, ...]:
    check_isinstance("shape", shape, (list, tuple))
    if not 1 <= len(shape) <= MAX_DIMS:
        raise ParamInvalidError(f"shape has {len(shape)} dims; 1 to {MAX_DIMS} are possible")
    dims = [check_int64(f"shape[{i}]", dim) for i, dim in enumerate(shape)]
    return dims if isinstance(shape, list) else tuple(dims)


class Cache:
    """A handle to a cache of this process. Made by the cache manager, not by callers.

    Args:
        cache_id: Its id in this process.
        cache_desc: What it is made of.
        tensor_addrs: Address of each tensor.
        is_blocks_cache: Whether dim 0 counts blocks.
        life: Private token of the engine life that made it; None for one that no engine knows.
    """

    __slots__ = ("__weakref__", "_cache_desc", "_cache_id", "_is_blocks_cache", "_life", "_tensor_addrs")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: Sequence[int],
        is_blocks_cache: bool = False,
        life: object | None = None,
    ) -> None:
        self._cache_id = check_int64("cache_id", cache_id)
        self._cache_desc: CacheDesc = check_isinstance("cache_desc", cache_desc, CacheDesc)
        self._tensor_addrs = check_list_uint64("tensor_addrs", tensor_addrs)
        self._is_blocks_cache: bool = check_isinstance("is_blocks_cache", is_blocks_cache, bool)
        self._life = life

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: Sequence[int]) -> Cache:
        """A handle to blocks in host memory that is registered nowhere (cache id -1).

        Raises:
            ParamInvalidError: The placement is not HOST, or there is not one address per tensor.
        """
        check_isinstance("cache_desc", cache_desc, CacheDesc)
        addresses = check_list_uint64("addrs", addrs)
        if cache_desc.placement != Placement.HOST:
            raise ParamInvalidError(
                f"create_cpu_cache needs placement HOST; the desc has {cache_desc.placement.name}"
            )
        if len(addresses) != cache_desc.num_tensors:
            raise ParamInvalidError(
                f"addrs has {len(addresses)} addresses; the desc has {cache_desc.num_tensors} tensors"
            )
        return cls(_NOT_REGISTERED, cache_desc, addresses, True)

    def belongs_to(self, life: object) -> bool:
        """Whether that engine life made this handle. For the library."""
        return self._life is life

    @property
    def is_cpu_cache(self) -> bool:
        """Whether :meth:`create_cpu_cache` made it: registered nowhere. For the library."""
        return self._cache_id == _NOT_REGISTERED and self._life is None

    @property
    def cache_id(self) -> int:
        """Its id in this process."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What it is made of."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """Address of each tensor."""
        return list(self._tensor_addrs)

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """The addresses per device: one list, because an engine has one device."""
        return [self.tensor_addrs]

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dim 0 counts blocks."""
        return self._is_blocks_cache

    def __repr__(self) -> str:
        kind = "blocks" if self._is_blocks_cache else "cache"
        return f"Cache(cache_id={self._cache_id}, {kind}, {self._cache_desc!r})"


KvCache = Cache
"""Another name for :class:`Cache`."""


@dataclass(frozen=True, slots=True)
class MemInfo:
    """A range of memory.

    Attributes:
        mem_type: Its kind.
        addr: Its address, uint64.
        size: Its bytes, int64.
    """

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        check_isinstance("mem_type", self.mem_type, Memtype)
        object.__setattr__(self, "addr", check_uint64("addr", self.addr))
        object.__setattr__(self, "size", check_int64("size", self.size))
