"""A destination that cannot be written is refused before a byte of it is: by pulls, pushes and copies."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from tests.support import actors
from tests.support.engines import Layers
from tests.support.memory import FILL, PAGE, Mapping, bytes_at
from tests.support.pair import D_ID, Pair, Shape, by_id, of_model
from tests.support.peers import Outcome
from tests.support.world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
SHAPE = Shape(tensors=2, dim0=4, stride=PAGE)
EVERY = list(range(SHAPE.dim0))
LIBC = ctypes.CDLL(None, use_errno=True)
RIGHTS = {
    "read-only before": mmap.PROT_READ,
    "read-only": mmap.PROT_READ,
    "no access": 0,
    "writable": mmap.PROT_READ | mmap.PROT_WRITE,
}
WAYS = ["read-only before", "read-only", "no access"]  # a hole would be filled by the next mapping of anybody


def _protect(w: World, name: str, how: str, tensor: int = 1) -> int:
    """Takes a tensor away, or gives it back; its address."""
    address, nbytes = w.held[name].addresses[tensor], w.held[name].tensor_nbytes
    assert not LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), RIGHTS[how])
    return address


def _first_unchanged(w: World, name: str) -> bool:
    return bool((w.held[name].tensor(0) == FILL).all())


def _push_layers(w: World, name: str, target: Any, blocks: list[int], layers: int = 1) -> LLMStatusCode:
    """Two tensors are a layer."""
    config: Any
    if isinstance(target, BlocksCacheKey):
        config = dd.TransferWithCacheKeyConfig(target, range(layers), range(layers))
    else:
        config = dd.TransferConfig(D_ID, target, range(layers))
    task = w.dist.cache_manager.transfer_cache_async(
        w.held[name].cache, Layers(), [config], blocks, blocks, SHAPE.stride
    )
    code = task.synchronize()
    if code != LLMStatusCode.LLM_SUCCESS:
        raise task.exception()
    return code


def _destination(pair: Pair, name: str, how: str, kind: str, own: bool = True) -> int:
    """A cache of D, tensor 1 of which is taken away before or after it was registered; the address of that."""
    pair.d.call(actors.make, name, **SHAPE.memory(), own=own, gap=0)
    if "before" in how:
        pair.d.call(_protect, name, how)
    if kind == "blocks":
        pair.d.call(actors.blocks_cache, name, model_id=0)
    else:
        pair.d.call(actors.slot_cache, name)
    if "before" in how:
        return int(pair.d.call(_addresses, name)[1])
    _warm_up(pair, name, kind)
    return int(pair.d.call(_protect, name, how))


def _warm_up(pair: Pair, name: str, kind: str) -> None:
    """What is done again takes shorter ways."""
    if kind == "blocks":
        for _ in range(3):
            pair.pull_blocks([1], [2], name=name).ok()
    pair.d.call(actors.refill, name, None)


def _addresses(w: World, name: str) -> list[int]:
    return w.held[name].addresses


def _refused(pair: Pair, name: str, address: int, outcome: Outcome) -> None:
    outcome.expect(INVALID, "cannot be written", f"tensor 1 at {address:#x}")
    assert pair.d.call(_first_unchanged, name), "bytes of tensor 0 were written"


@pytest.mark.rule("5.67")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.rule("R.2")
def test_g5_no_byte_of_a_destination_with_a_tensor_that_cannot_be_written(pair: Pair, how: str) -> None:
    pair.up()
    pair.source(shape=SHAPE)
    address = _destination(pair, "dst", how, "blocks")
    for blocks in ([1], [1], EVERY):
        _refused(pair, "dst", address, pair.pull_blocks(blocks, blocks))
    if pair.combo.mode == "B":
        push = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", EVERY, EVERY)
        _refused(pair, "dst", address, push)
    target = of_model(0, D_ID) if pair.combo.mode == "B" else pair.d.call(_addresses, "dst")
    _refused(pair, "dst", address, pair.p.attempt(_push_layers, "src", target, EVERY))
    pair.d.call(_protect, "dst", "writable")
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.parametrize("mode", ["A", "B"])
def test_g5_no_layer_of_a_push_to_a_last_layer_that_cannot_be_written(
    pair_of: Callable[[str, str], Pair], mode: str
) -> None:
    pair = pair_of(mode, "local").up()
    shape = Shape(tensors=4, dim0=4, stride=PAGE)
    pair.source(shape=shape)
    pair.destination(shape=shape, model_id=0, own=True, gap=0)
    address = pair.d.call(_protect, "dst", "read-only", 3)
    target = of_model(0, D_ID) if mode == "B" else pair.d.call(_addresses, "dst")
    push = pair.p.attempt(_push_layers, "src", target, EVERY, 2)
    push.expect(INVALID, f"tensor 3 at {address:#x}")
    pair.unchanged()


@pytest.mark.rule("5.67")
@pytest.mark.parametrize("how", WAYS)
def test_g5_the_same_of_slots(pair: Pair, how: str) -> None:
    pair.up()
    cache_id = pair.slots(shape=SHAPE, keys=[(1, 0)])
    address = _destination(pair, "dst", how, "slots")
    _refused(pair, "dst", address, pair.pull_cache(by_id(cache_id), 0))
    if pair.combo.mode == "A":
        _refused(pair, "dst", address, pair.pull_cache(CacheKey(1, 1), 1))
    else:
        push = pair.p.attempt(actors.push_cache, by_id(pair.d.call(_cache_id, "dst"), 2, D_ID), "src", 1)
        _refused(pair, "dst", address, push)


def _cache_id(w: World, name: str) -> int:
    return int(w.held[name].cache.cache_id)


@pytest.mark.parametrize("mode", ["A", "B"])
def test_g5_memory_of_our_own_pool_that_was_protected(pair_of: Callable[[str, str], Pair], mode: str) -> None:
    """Where ``shm`` copies in user space a store there would be a SIGSEGV."""
    pair = pair_of(mode, "shm").up()
    pair.source(shape=SHAPE)
    address = _destination(pair, "dst", "read-only", "blocks", own=False)
    for blocks in ([1], EVERY):
        _refused(pair, "dst", address, pair.pull_blocks(blocks, blocks))
    pair.d.call(_protect, "dst", "writable")
    pair.pull_blocks([1], [2]).ok()


def test_g5_what_a_plan_spares_may_be_read_only(pair: Pair) -> None:
    pair.up()
    pair.source(shape=SHAPE)
    _destination(pair, "dst", "read-only", "blocks")
    pair.pull_blocks(
        [1, 3], [2, 0], src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=1
    ).ok()


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_g5_a_file_that_was_cut_short(pair_of: Callable[[str, str], Pair], backend: str) -> None:
    """Its mapping may still be written, and what is beyond its end is not there."""
    pair = pair_of("B", backend).up()
    pair.source(shape=SHAPE)
    pair.d.call(actors.make, "dst", **SHAPE.memory(), own=True, gap=0)
    address = pair.d.call(_map_file, "dst")
    pair.d.call(actors.blocks_cache, "dst", model_id=0)
    _warm_up(pair, "dst", "blocks")
    pair.d.call(_cut_file, "dst")
    for blocks in ([1], [1], EVERY):
        _refused(pair, "dst", address, pair.pull_blocks(blocks, blocks))


def _map_file(w: World, name: str) -> int:
    held = w.held[name]
    fd = os.memfd_create("destination")
    os.ftruncate(fd, held.tensor_nbytes)
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | 0x10  # fixed
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    assert LIBC.mmap(held.addresses[1], held.tensor_nbytes, rights, flags, fd, 0) == held.addresses[1]
    w.extras["file"] = fd
    return held.addresses[1]


def _cut_file(w: World, name: str) -> None:
    fd = w.extras.pop("file")
    os.ftruncate(fd, 0)
    os.close(fd)


# ---- within one process -----------------------------------------------------------------------------------------

DESC = {"HOST": dd.Placement.HOST, "DEVICE": dd.Placement.DEVICE}


@pytest.mark.parametrize("kind", ["copy_cache", "copy_blocks", "swap_blocks"])
def test_g5_copies_write_nothing_either(kind: str) -> None:
    source, destination = Mapping(8 * PAGE), Mapping(8 * PAGE)
    source.view(0, source.nbytes)[:] = 7
    destination.view(0, destination.nbytes)[:] = FILL
    engine = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    engine.init({"llm.EnableCacheManager": "1"})
    try:
        manager = engine.cache_manager
        register: Any = manager.register_cache if kind == "copy_cache" else manager.register_blocks_cache
        src, dst = (
            register(
                dd.CacheDesc(2, [4, PAGE], dd.DataType.DT_UINT8, DESC[placement]),
                [memory.address, memory.address + 4 * PAGE],
            )
            for memory, placement in ((source, "HOST"), (destination, "DEVICE"))
        )
        assert not LIBC.mprotect(
            ctypes.c_void_p(destination.address + 4 * PAGE), ctypes.c_size_t(4 * PAGE), mmap.PROT_READ
        )
        copies: dict[str, Callable[[], object]] = {
            "copy_cache": lambda: manager.copy_cache(dst, src, 1, 2),
            "copy_blocks": lambda: manager.copy_blocks(dst, {0: [1, 2], 1: [0]}),
            "swap_blocks": lambda: manager.swap_blocks(src, dst, {0: 1, 3: 2}),
        }
        with pytest.raises(dd.ParamInvalidError, match=f"{kind}: .*cannot be written: tensor 1 at"):
            copies[kind]()
        assert (np.asarray(bytes_at(destination.address, 8 * PAGE)) == FILL).all()
    finally:
        engine.finalize()
        source.close()
        destination.close()
