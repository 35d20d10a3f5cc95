"""Messages between two engines: frozen structs, tagged, encoded as msgpack.

Forward compatible: an unknown field is skipped, a missing one takes its default. Arrays are not here:
they travel as raw little-endian attachments of the frame (see ``framing``); each message says which.
How much a field may hold is part of its type, and looked at before it is decoded. Every number comes from a
peer: whoever uses one checks it first.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from llm_datadist._core import limits

PROTOCOL_VERSION = 1

Uint: TypeAlias = Annotated[int, Meta(ge=0)]  # msgpack has nothing above 2**64 - 1
Ms: TypeAlias = Annotated[
    int, Meta(ge=-limits.TIME_MS, le=limits.TIME_MS)
]  # what is left may be less than nothing
Text: TypeAlias = Annotated[str, Meta(max_length=limits.TEXT_CHARS)]
Name: TypeAlias = Annotated[str, Meta(max_length=limits.NAME_CHARS)]
Endpoints: TypeAlias = Annotated[dict[Name, bytes], Meta(max_length=limits.ENDPOINTS)]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=limits.ENDPOINTS)]
Secret: TypeAlias = Annotated[bytes, Meta(max_length=limits.SECRET_NBYTES)]
Notice: TypeAlias = Annotated[bytes, Meta(max_length=limits.NOTIFY_NBYTES)]
NoticeName: TypeAlias = Annotated[str, Meta(max_length=limits.NOTIFY_NBYTES)]


class Message(msgspec.Struct, frozen=True, tag_field="t", kw_only=True):
    """Base of all messages."""


# ---- handshake ------------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a peer is.

    Attributes:
        instance: 16 random bytes per init: tells a restarted process from the same one.
        accessible: Mode B (True) or mode A.
        backend: Transport that it forces, or "auto".
        listens_at: Text: where it says that it can be dialled (llm.AdvertiseIp); "": as it was dialled.
    """

    cluster_id: int
    instance: Secret
    role: int
    accessible: bool
    backend: Name = "auto"
    heartbeat_ms: int = 1000
    link_timeout_ms: int = 30000
    listens_at: Name = ""


class Hello(Message, frozen=True, kw_only=True):
    """First frame of the dialling side. ``challenge``: random, for this one connection; see ``proofs``."""

    version: int
    target_id: int
    identity: Identity
    challenge: Secret


class Welcome(Message, frozen=True, kw_only=True):
    """The dialled side accepts.

    Attributes:
        seed: Random; the secret of the link is made of it and of both challenges.
        endpoints: Transport name -> its ``endpoint()`` bytes, for this one connection.
    """

    identity: Identity
    seed: Secret
    challenge: Secret
    endpoints: Endpoints = {}


class Confirm(Message, frozen=True, kw_only=True):
    """The dialler has probed. ``reads_by``: the transports with which it will read the dialled side.

    ``endpoints`` as in Welcome.
    """

    reads_by: Names
    endpoints: Endpoints = {}


class Established(Message, frozen=True, kw_only=True):
    """The dialled side has probed as well, and counts the link as up."""

    reads_by: Names


class Refused(Message, frozen=True, kw_only=True):
    """The end of a handshake. ``kind`` "already": a link between these two is there or being made."""

    code: int
    text: Text
    kind: Name = ""


class DataHello(Message, frozen=True, kw_only=True):
    """First frame of a data connection. ``dialler_reads``: the dialling side requests on it."""

    version: int
    link_token: Secret
    dialler_reads: bool


# ---- liveness and unlinking -------------------------------------------------------------------------


class Heartbeat(Message, frozen=True, kw_only=True):
    """I am here."""


class Ping(Message, frozen=True, kw_only=True):
    """Answered at once by Pong with the same id."""

    id: Uint


class Pong(Message, frozen=True, kw_only=True):
    """Answer to Ping."""

    id: Uint


class Bye(Message, frozen=True, kw_only=True):
    """The sender drops the link now."""

    text: Text


class Unlink(Message, frozen=True, kw_only=True):
    """Asks to drop the link when idle, within the time; answered by Done.

    ``if_unused``: unless callers of the peer's link_clusters use it; then the answer is LLM_EXIST_LINK.
    ``clusters_only``: the link stays, a comm holds it; link_clusters uses it no more, on either side.
    """

    id: Uint
    time_left_ms: Ms
    if_unused: bool = False
    clusters_only: bool = False


class Settle(Message, frozen=True, kw_only=True):
    """Answered by Done once every transfer of the receiver's callers on this link that was under way has ended.

    ``cache_id``: only those that read this cache of the sender, which are cut off; 0: all, in their own time.
    """

    id: Uint
    time_left_ms: Ms
    cache_id: int = 0


class Done(Message, frozen=True, kw_only=True):
    """Answer to Unlink, Settle, PartReady and Finish, and the refusal of every other request."""

    id: Uint
    code: int
    text: Text = ""
    nbytes: Uint = 0  # that a part moved


# ---- caches ------------------------------------------------------------------------------------------


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A 64-bit word in its giver's slab and the value it must have. ``address`` 0: not for one-sided use."""

    address: Uint = 0
    value: Uint = 0


class KeyRef(msgspec.Struct, frozen=True, kw_only=True):
    """A key on the wire. ``kind``: "req", "prefix" (id, model_id), "cache" (id = cache id), "blocks" (model_id).

    ``word``: of a bound key in a table (see ``CacheEntry``); None in questions.
    """

    kind: Name
    id: int = 0
    model_id: int = 0
    batch_index: Uint = 0
    word: Word | None = None


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A cache as its owner describes it to a peer."""

    cache_id: int
    is_blocks: bool
    num_tensors: int
    dim0: int
    stride_nbytes: int
    word: Word
    keys: Annotated[tuple[KeyRef, ...], Meta(max_length=limits.KEYS)] = ()
    token: Annotated[bytes, Meta(max_length=limits.TOKEN_NBYTES)] = b""


class Resolve(Message, frozen=True, kw_only=True):
    """Mode A: find this key and hold the cache for me. Answered by Grant or Done."""

    id: Uint
    key: KeyRef
    time_left_ms: Ms


class Grant(Message, frozen=True, kw_only=True):
    """A lease. Attachment 0: tensor addresses, uint64 (empty unless the reader is one-sided).

    ``takes_key``: a complete read releases a request key, so it ends with Finish.
    """

    id: Uint
    lease_id: Uint
    lease: Word
    entry: CacheEntry
    batch_index: Uint = 0
    takes_key: bool = False


class Release(Message, frozen=True, kw_only=True):
    """The reader is done with a lease; ``nbytes``: that arrived."""

    lease_id: Uint
    nbytes: Uint = 0


class Lookup(Message, frozen=True, kw_only=True):
    """Mode B: a key that is not in my copy of your table. Answered by Found or Done."""

    id: Uint
    key: KeyRef


class Found(Message, frozen=True, kw_only=True):
    """Answer to Lookup. Attachment 0 as in Grant."""

    id: Uint
    entry: CacheEntry
    batch_index: Uint = 0


class Announce(Message, frozen=True, kw_only=True):
    """Mode B: this cache is in my table. Attachment 0: its addresses, as in Grant.

    ``more_keys``: the keys come on top of those that the last announcement of the same cache had.
    """

    entry: CacheEntry
    more_keys: bool = False


class Withdraw(Message, frozen=True, kw_only=True):
    """These caches have left my table (mode B), and are published no more."""

    cache_ids: Annotated[tuple[int, ...], Meta(max_length=limits.CACHE_IDS)]


# ---- pushes --------------------------------------------------------------------------------------------


class Publish(Message, frozen=True, kw_only=True):
    """This cache of mine may be the source of offers on this link. Attachment 0 as in Grant.

    In place of what the cache was published with before. See ``_core.sources`` for how long it stays.
    """

    entry: CacheEntry


class Offer(Message, frozen=True, kw_only=True):
    """A push, or a layer-wise task for one peer: what may be read of the sender, and where it shall go.

    Not answered: each PartReady of it is. Attachments: 0 source block indices, 1 destination block indices,
    2 raw destination addresses (empty: by ``target``); all uint64. Layer ranges are [start, stop) in layers;
    None = all tensors.

    Attributes:
        kind: "cache", "blocks" or "layers": which rules of the contract apply.
        source_id: A cache of the sender that is published.
        source_batch: Source slot when there are no source blocks.
        unit_nbytes: Bytes between two destination blocks ("layers" only; 0 = the source's block bytes).
        part_tensors: Tensors that each part moves; parts come in order.
        notify: Name and message that go into the destination's queue once its data is there.
    """

    id: Uint
    kind: Name
    source_id: int
    source_batch: Uint = 0
    target: KeyRef | None = None
    src_layers: tuple[int, int] | None = None
    dst_layers: tuple[int, int] | None = None
    tensors_per_layer: Uint = 2
    unit_nbytes: Uint = 0
    part_tensors: Uint
    notify: tuple[NoticeName, Notice] | None = None


class PartReady(Message, frozen=True, kw_only=True):
    """Part ``part`` of an offer may be read now, while ``lease`` holds. Answered by Done."""

    id: Uint
    offer_id: Uint
    part: Uint
    lease_id: Uint
    lease: Word
    time_left_ms: Ms


class EndOffer(Message, frozen=True, kw_only=True):
    """No more parts: forget the offer, stop what runs of it. ``ok``: as in ``Decided``, of its notification."""

    offer_id: Uint
    ok: bool = False


# ---- the end of a call ---------------------------------------------------------------------------------


class Finish(Message, frozen=True, kw_only=True):
    """The data of a call is complete: make ready what it ends with. Answered by Done; then ``Decided`` follows.

    Attributes:
        lease_id: Of the read, which ends now; 0: none. Its request key is released for the tensors [first, stop).
        nbytes: That it read.
        notify: Name and message for the receiver's queue.
    """

    id: Uint
    lease_id: Uint = 0
    first_tensor: int = 0
    tensor_stop: int = 0
    nbytes: Uint = 0
    notify: tuple[NoticeName, Notice] | None = None


class Decided(Message, frozen=True, kw_only=True):
    """The outcome of a call that has said Finish: all that was made ready happens now, or nothing of it.

    Its initiator decides, so that it needs no answer. A link that goes down before stands for ``ok``, for then the
    initiator may have reported success; but after a Bye of the initiator for not: its call has failed.
    """

    finish_id: Uint
    ok: bool


# ---- data connections ----------------------------------------------------------------------------------


class NeedConnections(Message, frozen=True, kw_only=True):
    """Please dial this many data connections on which I may read."""

    count: Annotated[int, Meta(ge=1, le=limits.CONNECTIONS_ASKED)]


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The selector of a read that the owner serves: lease or generation, and the part of the cache.

    Followed by the indices, uint32 or uint64 by ``index_nbytes``.
    """

    cache_id: int
    generation: Uint
    lease_id: Uint = 0
    lease_value: Uint = 0
    more_leases: Annotated[
        tuple[tuple[int, int], ...], Meta(max_length=limits.LEASES_OF_A_READ - 1)
    ] = ()  # (id, value) of others that must hold as well
    first_tensor: int
    tensor_count: int
    unit_nbytes: Uint
    row_nbytes: int
    index_nbytes: int = 8


AnyMessage = (
    Hello | Welcome | Confirm | Established | Refused | DataHello
    | Heartbeat | Ping | Pong | Bye | Unlink | Settle | Done
    | Resolve | Grant | Release | Lookup | Found | Announce | Withdraw
    | Publish | Offer | PartReady | EndOffer | Finish | Decided | NeedConnections
)  # fmt: skip
