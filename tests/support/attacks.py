"""Linked peers that do what no engine does: in a process of their own, each until it is told to stop.

An attack is a generator that sends something at each step; ``run`` is the actor that drives it. Whatever comes back is
read and dropped, unless the attack says that it reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from llm_datadist._wire import messages as m
from llm_datadist._wire.framing import Decoder
from llm_datadist._wire.proofs import secret_of
from tests.support.raw_links import hello
from tests.support.world import World

BYTES_A_SECOND = 6_000_000
_PIECE = 32 << 10
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any, *attachments: bytes) -> bytes:
    """A frame, whatever its size and content; ``message`` may be a plain dict."""
    body = _encoder.encode(message)
    sizes = [len(a) for a in attachments]
    head = struct.pack(f"<II{len(sizes)}I", len(body), len(sizes), *sizes)
    rest = b"".join((head, body, *attachments))
    return struct.pack("<I", len(rest)) + rest


class RawLink:
    """A link to an engine made of a bare socket; ``at``: its own address, if that matters.

    Attributes:
        token: Of the link.
        ended: The engine has closed it.
    """

    def __init__(
        self,
        address: Any,
        target_id: int,
        *,
        accessible: bool,
        cluster_id: int = 90,
        reads: bool = True,
        at: str = "",
    ) -> None:
        self.address = tuple(address)
        self.sock = socket.create_connection(self.address, source_address=(at, 0) if at else None)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(5)
        self.ended = False
        self._decoder = Decoder(64 << 20)
        me = m.Identity(
            cluster_id=cluster_id, instance=os.urandom(16), role=1, accessible=accessible, heartbeat_ms=60_000
        )
        challenge = os.urandom(16)
        self.sock.sendall(frame(hello(target_id, me, challenge)))
        welcome = self.hear()
        assert isinstance(welcome, m.Welcome), welcome
        self.token = secret_of(welcome.seed, challenge, welcome.challenge)
        self.sock.sendall(frame(m.Confirm(reads_by=("tcp",), endpoints={"tcp": b""})))
        established = self.hear()
        assert isinstance(established, m.Established), established
        if reads:
            threading.Thread(target=self._drop_all, daemon=True).start()

    def hear(self) -> Any:
        """The next message; None at the end."""
        while True:
            found = self._decoder.take()
            if found is not None:
                return found.message
            data = self.sock.recv(65536)
            if not data:
                return None
            self._decoder.push(data)

    def _drop_all(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.settimeout(None)
            while self.sock.recv(1 << 20):
                pass
        self.ended = True

    def data_connection(self) -> socket.socket:
        """One on which this peer reads."""
        sock = socket.create_connection(self.address)
        sock.sendall(
            frame(m.DataHello(version=m.PROTOCOL_VERSION, link_token=self.token, dialler_reads=True))
        )
        sock.settimeout(0.05)
        return sock

    def send(self, data: bytes) -> None:
        """As far as the engine takes it."""
        with contextlib.suppress(OSError):
            self.sock.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


Attack = Callable[[RawLink, Any], Iterator[None]]
ATTACKS: dict[str, Attack] = {}
UNREAD = set()  # attacks that read no answer


def attack(name: str, *, unread: bool = False) -> Callable[[Attack], Attack]:
    def enter(func: Attack) -> Attack:
        ATTACKS[name] = func
        if unread:
            UNREAD.add(name)
        return func

    return enter


def run(w: World, name: str, address: Any, target_id: int, accessible: bool, flag: str, more: Any) -> int:
    """Attacks until ``raise_flag``; how often the link had to be made anew."""
    links = 0
    while not w.extras.get(flag):
        try:
            link = RawLink(address, target_id, accessible=accessible, reads=name not in UNREAD)
        except (OSError, AssertionError):  # the one before is still being closed there
            time.sleep(0.01)
            continue
        links += 1
        try:
            for _ in ATTACKS[name](link, more):
                if w.extras.get(flag) or link.ended:
                    break
        finally:
            link.close()
    return links


def _flood(link: RawLink, *messages: Any) -> Iterator[None]:
    """6 MB a second of these messages."""
    one = b"".join(map(frame, messages))
    piece = one * (_PIECE // len(one) + 1)
    began, sent = time.monotonic(), 0
    while True:
        link.send(piece)
        sent += len(piece)
        time.sleep(max(0.0, began + sent / BYTES_A_SECOND - time.monotonic()))
        yield


@attack("pings")
def _pings(link: RawLink, more: Any) -> Iterator[None]:
    return _flood(link, m.Ping(id=1))


@attack("pings, no answer read", unread=True)
def _unread_pings(link: RawLink, more: Any) -> Iterator[None]:
    return _flood(link, m.Ping(id=1))


@attack("look-ups, no answer read", unread=True)
def _unread_lookups(link: RawLink, more: Any) -> Iterator[None]:
    key = m.KeyRef(kind="cache", id=more["cache_id"])
    return _flood(link, m.Resolve(id=1, key=key, time_left_ms=1), m.Lookup(id=2, key=key))


@attack("settles and unlinks")
def _settles(link: RawLink, more: Any) -> Iterator[None]:
    settles = [m.Settle(id=1, time_left_ms=2**31 - 1), m.Settle(id=2, time_left_ms=60_000, cache_id=1)]
    return _flood(link, *settles, m.Unlink(id=3, time_left_ms=60_000, if_unused=True))


@attack("notifications")
def _notifications(link: RawLink, more: Any) -> Iterator[None]:
    pairs = ((m.Finish(id=n, notify=("x", b"y" * 20)), m.Decided(finish_id=n, ok=True)) for n in range(1000))
    return _flood(link, *(message for pair in pairs for message in pair))


@attack("leases")
def _leases(link: RawLink, more: Any) -> Iterator[None]:
    key = m.KeyRef(kind="cache", id=more["cache_id"])
    return _flood(link, m.Resolve(id=1, key=key, time_left_ms=2**31 - 1))


@attack("a withdrawal of 4 million")
def _withdrawal(link: RawLink, more: Any) -> Iterator[None]:
    data = frame({"t": "Withdraw", "cache_ids": [0] * 4_000_000})
    while True:
        link.send(data)
        yield


@attack("an announcement of 90,000 keys")
def _announcement(link: RawLink, more: Any) -> Iterator[None]:
    keys = [{"kind": "req", "id": n} for n in range(90_000)]
    entry = {
        "cache_id": 1, "is_blocks": False, "num_tensors": 1, "dim0": 1, "stride_nbytes": 1, "word": {}, "keys": keys,
    }  # fmt: skip
    data = frame({"t": "Announce", "entry": entry})
    while True:
        link.send(data)
        yield


def _entry(**more: Any) -> m.CacheEntry:
    sizes = {"num_tensors": 2, "dim0": 1 << 30, "stride_nbytes": 64} | more
    return m.CacheEntry(cache_id=1, is_blocks=True, word=m.Word(), **sizes)


@attack("an offer of equal bases and far blocks")
def _offers(link: RawLink, more: Any) -> Iterator[None]:
    """Half of the blocks in one tensor, half in another: all of it is registered, none of it with one look."""
    first, second, stride = more["addresses"][0], more["addresses"][1], more["stride"]
    count = 100_000
    per_tensor = more["nbytes"] // stride
    near = np.arange(per_tensor, dtype=np.uint64)
    far = near + np.uint64((second - first) // stride)
    blocks = np.concatenate((near, far))
    bases = np.full(count, first, dtype=np.uint64)
    link.send(frame(m.Publish(entry=_entry(num_tensors=count, stride_nbytes=stride)), b""))
    offer = m.Offer(id=1, kind="layers", part_tensors=2, unit_nbytes=stride, source_id=1)
    lists = (np.arange(len(blocks), dtype=np.uint64), blocks, bases)
    part = m.PartReady(id=2, offer_id=1, part=0, lease_id=1, lease=m.Word(), time_left_ms=60_000)
    data = frame(offer, *(a.tobytes() for a in lists)) + frame(part)
    while True:
        link.send(data)
        time.sleep(0.05)
        link.send(frame(m.EndOffer(offer_id=1)))
        yield


@attack("offers that never end")
def _held_offers(link: RawLink, more: Any) -> Iterator[None]:
    link.send(frame(m.Publish(entry=_entry()), b""))
    for number in range(10_000_000):
        offer = m.Offer(id=number, kind="layers", part_tensors=2, source_id=1)
        link.send(frame(offer, bytes(1 << 20), bytes(1 << 20), b""))
        yield


@attack("parts, no answer read", unread=True)
def _parts(link: RawLink, more: Any) -> Iterator[None]:
    link.send(frame(m.Publish(entry=_entry()), b""))
    link.send(frame(m.Offer(id=1, kind="layers", part_tensors=2, source_id=1), b"", b"", b""))
    part = m.PartReady(id=2, offer_id=1, part=0, lease_id=1, lease=m.Word(), time_left_ms=60_000)
    return _flood(link, part)


def _request(selector: bytes) -> bytes:
    return struct.pack("<4sIQQI4x", b"LDr1", 1, 0, 1, len(selector)) + selector


def _selector(head: dict[str, Any], indices: bytes) -> bytes:
    raw = _encoder.encode(
        {
            "cache_id": 1,
            "generation": 0,
            "first_tensor": 0,
            "tensor_count": 1,
            "unit_nbytes": 1,
            "row_nbytes": 1,
        }
        | head
    )
    return len(raw).to_bytes(4, "little") + raw + indices


@attack("64 selectors of 16 MiB")
def _selectors(link: RawLink, more: Any) -> Iterator[None]:
    indices = np.arange((16 << 20) // 4 - 64, dtype=np.uint32).tobytes()
    head = {
        "cache_id": more["cache_id"],
        "index_nbytes": 4,
        "unit_nbytes": 1,
        "row_nbytes": len(indices) // 4,
    }
    return _all_at_once(link, 64, _request(_selector(head, indices)))


@attack("a selector of 5 million leases")
def _many_leases(link: RawLink, more: Any) -> Iterator[None]:
    head = {"lease_id": 1, "more_leases": [(0, 0)] * 5_000_000}
    return _all_at_once(link, 4, _request(_selector(head, b"")))


@attack("small reads on 64 connections")
def _small_reads(link: RawLink, more: Any) -> Iterator[None]:
    selector = _selector({"cache_id": more["cache_id"], "index_nbytes": 4}, bytes(4))
    return _all_at_once(link, 64, _request(selector) * 100)


@attack("links, again and again")
def _relinks(link: RawLink, more: Any) -> Iterator[None]:
    yield


@attack("handshakes of many")
def _handshakes(link: RawLink, more: Any) -> Iterator[None]:
    """Each names another cluster, and is given up when it is half made."""
    number = 1000
    while True:
        socks = []
        for _ in range(64):
            number += 1
            me = m.Identity(
                cluster_id=number,
                instance=os.urandom(16),
                role=1,
                accessible=more["accessible"],
            )
            with contextlib.suppress(OSError):
                socks.append(socket.create_connection(link.address, 1))
                socks[-1].sendall(
                    frame(hello(1, me)) + frame(m.Confirm(reads_by=("tcp",), endpoints={"tcp": b""}))
                )
        for sock in socks:
            sock.settimeout(1)
            with contextlib.suppress(OSError):
                sock.recv(65536)
            sock.close()
        yield


@attack("grants that nobody asked for", unread=True)
def _grants(link: RawLink, more: Any) -> Iterator[None]:
    return _flood(link, m.Grant(id=10**9, lease_id=1, lease=m.Word(), entry=_entry()))


@attack("requests for connections")
def _need_connections(link: RawLink, more: Any) -> Iterator[None]:
    return _flood(link, m.NeedConnections(count=64))


def _all_at_once(link: RawLink, count: int, data: bytes) -> Iterator[None]:
    """On so many connections, on each again when it is through."""
    waiting = [(link.data_connection(), 0) for _ in range(count)]
    for sock, _ in waiting:
        sock.setblocking(False)
    try:
        while True:
            select.select([], [sock for sock, _ in waiting], [], 0.01)
            later = []
            for sock, at in waiting:
                with contextlib.suppress(BlockingIOError):
                    at += sock.send(memoryview(data)[at : at + (1 << 20)])
                with contextlib.suppress(BlockingIOError):
                    sock.recv(65536)
                later.append((sock, at % len(data)))
            waiting = later
            yield
    finally:
        for sock, _ in waiting:
            sock.close()
