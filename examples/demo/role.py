"""What prefill and decode have in common: how they start, load the model, make their engine and report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

from examples.demo.lines import Lines, Message, PeerGoneError
from examples.demo.settings import BLOCK_SIZE, POOL_NBYTES, Settings
from examples.llama import Llama, PagedCache, Tokenizer
from examples.llama.gguf_file import ModelFileError, load
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
)

_PROGRESS_INTERVAL = 0.05

Role = Callable[[Settings, Message, Lines, Lines, ExitStack], None]


def run(role: Role) -> None:
    """The main program of a child: ``python -m MODULE CONTROL_FD HANDOFF_FD``.

    Control is the line to the driver, hand-off the one to the other role. The first message on control
    holds the settings; after it the driver says nothing more, so that its end is all there is to hear.
    """
    control, handoff = (Lines(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    start = control.receive()
    # What goes wrong is reported as one line by the driver.
    logging.getLogger("llm_datadist").setLevel(logging.CRITICAL)
    Thread(target=_end_with_driver, args=(control,), daemon=True).start()
    with ExitStack() as end:  # of the engine: after the driver has heard why, before the other role does
        try:
            role(Settings(**start.pop("settings")), start, control, handoff, end)
        except PeerGoneError:
            # The other process's end is the cause; the driver names it and ends this one too.
            Event().wait()
        except (ModelFileError, LLMException, ValueError) as error:
            _report(control, str(error))
        except Exception as error:
            _report(control, f"{type(error).__name__}: {error}")


def _report(control: Lines, text: str) -> None:
    control.send({"event": "failed", "text": text, "at": time.monotonic()})


def _end_with_driver(control: Lines) -> None:
    try:
        control.receive()
    except PeerGoneError:
        os._exit(3)


def load_model(settings: Settings, control: Lines) -> tuple[Llama, Tokenizer]:
    """Loads the model and tells the driver how far it is."""
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now >= told + _PROGRESS_INTERVAL or done == total:
            told = now
            control.send({"event": "progress", "done": done, "total": total})

    return load(Path(settings.model), tell)


def make_engine(
    role: LLMRole, cluster_id: int, settings: Settings, end: ExitStack, listen: str | None = None
) -> LLMDataDist:
    """An initialised engine in the mode and with the transport that were asked for, finalized at the end."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = settings.mode == "accessible"
    config.transfer_backend = settings.transport
    config.sync_kv_timeout = 10_000
    if settings.transport == "shm":  # what peers are to map has to be the engine's own memory
        config.mem_pool_cfg = json.dumps({"memory_size": POOL_NBYTES})
    if listen is not None:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    end.callback(datadist.finalize)
    return datadist


def make_cache(
    model: Llama, num_blocks: int, datadist: LLMDataDist, cluster_id: int, settings: Settings
) -> tuple[PagedCache, Cache]:
    """A paged cache, and the handle under which the engine knows its memory: ours, or with shm the engine's."""
    shape = PagedCache.shape_of(model.config, num_blocks, BLOCK_SIZE)
    desc = CacheDesc(2 * model.config.layers, shape, DataType.DT_FLOAT)
    key = BlocksCacheKey(cluster_id)
    if settings.transport == "shm":
        handle = datadist.cache_manager.allocate_blocks_cache(desc, key)
        return PagedCache(model.config, num_blocks, BLOCK_SIZE, handle.tensor_addrs), handle
    paged = PagedCache(model.config, num_blocks, BLOCK_SIZE)
    return paged, datadist.cache_manager.register_blocks_cache(desc, paged.addresses, key)


def kv_digest(paged: PagedCache, blocks: Sequence[int]) -> str:
    """SHA-256 over the bytes of those blocks in every tensor."""
    digest = hashlib.sha256()
    for tensor in paged.tensors:
        digest.update(tensor[list(blocks)].tobytes())
    return digest.hexdigest()
