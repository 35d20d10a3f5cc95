"""Everything that a peer can make this engine do or hold, and what bounds it: the one table of limits.

A limit is looked at before what it bounds is decoded, allocated or queued. ``per`` says of what it is: a field or a
message (a breach closes the connection), a turn of the thread that serves all, a link or the whole engine (beyond
it the peer waits, or is answered LLM_OUT_OF_MEMORY or LLM_LINK_BUSY). docs/reference/limits.md shows the table.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

N = TypeVar("N", int, float)


class Limit(NamedTuple):
    """A row of the table."""

    per: str
    value: int | float
    why: str


TABLE: dict[str, Limit] = {}


def _limit(name: str, per: str, value: N, why: str) -> N:
    TABLE[name] = Limit(per, value, why)
    return value


# ---- before anything is known of a peer ----------------------------------------------------------------

HANDSHAKE_FRAME_NBYTES = _limit(
    "HANDSHAKE_FRAME_NBYTES", "message", 64 << 10, "nothing is known of the peer yet; a Hello has under 2 KiB"
)
HANDSHAKE_S = _limit("HANDSHAKE_S", "connection", 10.0, "then a connection without a link is dropped")
HANDSHAKES = _limit(
    "HANDSHAKES", "engine", 1024, "connections without a link yet; beyond it the oldest of them is dropped"
)

# ---- frames and fields -----------------------------------------------------------------------------------

FRAME_NBYTES = _limit(
    "FRAME_NBYTES", "message", 64 << 20, "an Offer of 10^6 blocks has two lists of 8 MB, and addresses"
)
MESSAGE_NBYTES = _limit(
    "MESSAGE_NBYTES",
    "message",
    4 << 20,
    "the part that is decoded to objects; lists of numbers are attachments",
)
ATTACHMENTS = _limit("ATTACHMENTS", "message", 8, "an Offer has four, each costs an object")
TEXT_CHARS = _limit("TEXT_CHARS", "field", 8192, "a reason; the sender cuts a longer one")
NAME_CHARS = _limit("NAME_CHARS", "field", 300, "of a transport, a kind or an address; a host name has 253")
ENDPOINTS = _limit("ENDPOINTS", "field", 16, "transports that a peer has, of which there are five")
SECRET_NBYTES = _limit(
    "SECRET_NBYTES", "field", 64, "random bytes that name a process or a link; ours have 16"
)
TOKEN_NBYTES = _limit("TOKEN_NBYTES", "field", 3 << 20, "what NIXL must know of a cache of 10^4 tensors")
TIME_MS = _limit("TIME_MS", "field", 2**31 - 1, "the options' own range: int32 ms")
KEYS = _limit("KEYS", "field", 1024, "of one announcement; an owner tells more of them in portions")
CACHE_IDS = _limit("CACHE_IDS", "field", 4096, "of one withdrawal; an owner tells more of them in portions")
NOTIFY_NBYTES = _limit("NOTIFY_NBYTES", "field", 64 << 10, "of a name and of a message: the contract's")
CONNECTIONS_ASKED = _limit("CONNECTIONS_ASKED", "field", 64, "data connections that a peer wants dialled")
SELECTOR_NBYTES = _limit(
    "SELECTOR_NBYTES", "message", 16 << 20, "of a read over tcp: 10^6 block numbers of 8 bytes, twice over"
)
SELECTOR_HEAD_NBYTES = _limit(
    "SELECTOR_HEAD_NBYTES", "field", 4096, "ten numbers and 63 leases have under 2 KiB"
)
LEASES_OF_A_READ = _limit(
    "LEASES_OF_A_READ", "field", 64, "layers that are read together; more bring nothing"
)

ANSWER_TEXT_NBYTES = _limit(
    "ANSWER_TEXT_NBYTES", "field", 1024, "of an answer over tcp or shm; the sender cuts a longer one"
)
AREAS = _limit("AREAS", "field", 16, "of memory that an owner shares over shm: its words and its pools")
NIXL_TENSORS = _limit("NIXL_TENSORS", "field", 1 << 20, "of one cache; NIXL must know each")
NIXL_METADATA_NBYTES = _limit(
    "NIXL_METADATA_NBYTES",
    "field",
    64 << 20,
    "NIXL has 40 bytes for a range over TCP, some hundreds with several network cards",
)

# ---- turns ---------------------------------------------------------------------------------------------------

TURN_MESSAGES = _limit(
    "TURN_MESSAGES", "turn", 16, "then the next link has its turn: some tenths of a millisecond"
)
TURN_CONNECTIONS = _limit(
    "TURN_CONNECTIONS",
    "turn",
    8,
    "of one link that are served over tcp, then those of others: as a reader opens",
)
TURN_NBYTES = _limit(
    "TURN_NBYTES",
    "turn",
    1 << 20,
    "received from one link, or served to it over tcp; then the next one has its turn",
)
TURN_OUT_NBYTES = _limit(
    "TURN_OUT_NBYTES", "turn", 4 << 20, "sent on one link, then the next one has its turn"
)
LAST_READS = _limit(
    "LAST_READS",
    "connection",
    64,
    "before it is closed, so that a peer can read why; who floods us may miss that",
)
FREE_S = _limit(
    "FREE_S",
    "link",
    0.5,
    "of a thread that serves all, in turns that were used up; then it rests as long as it works",
)
BURST_S = _limit("BURST_S", "link", 1.0, "of that thread; then the link has its share of it")
TURN_S = _limit(
    "TURN_S", "turn", 0.002, "spent on one link, or the links of one address; then the next one has its turn"
)
SHARE = _limit(
    "SHARE",
    "link",
    0.25,
    "of that thread, for a link or an address that has used up its burst; else it waits",
)
ADDRESS_BURST_S = _limit(
    "ADDRESS_BURST_S",
    "address",
    0.5,
    "of the control thread, in turns that were used up while others wanted it; then it has the share of a link",
)
WANTED_S = _limit(
    "WANTED_S", "engine", 1.0, "after a peer has asked, in which the links of other addresses have that share"
)
NEWCOMERS_BURST_S = _limit(
    "NEWCOMERS_BURST_S",
    "engine",
    1.0,
    "of the control thread for peers that dial: hundreds at once",
)
NEWCOMERS_SHARE = _limit(
    "NEWCOMERS_SHARE", "engine", 0.5, "of that thread, when that is used up; others wait in the backlog"
)
PUSH_EDGES = _limit(
    "PUSH_EDGES",
    "message",
    1 << 20,
    "ends of tensors between the blocks of a push to addresses, each looked up",
)

# ---- what is held ----------------------------------------------------------------------------------------------

OWED_NBYTES = _limit(
    "OWED_NBYTES", "link", 1 << 20, "answers not sent yet; above it what would be answered waits"
)
HELD_NBYTES = _limit(
    "HELD_NBYTES", "link", 64 << 20, "that waits so, 1 KiB each at least; above it the link is not read from"
)
OUTBOX_NBYTES = _limit(
    "OUTBOX_NBYTES",
    "link",
    256 << 20,
    "all that waits to be sent, our own tables included: four of the largest frames",
)
OUTBOX_SURE_NBYTES = _limit(
    "OUTBOX_SURE_NBYTES", "link", 8 << 20, "that may wait whatever waits on other links"
)
OUTBOXES_NBYTES = _limit(
    "OUTBOXES_NBYTES", "engine", 1 << 30, "that waits on all links; who adds to it is dropped"
)
INBOX_SURE_NBYTES = _limit(
    "INBOX_SURE_NBYTES", "link", 8 << 20, "of a message that comes in, whatever comes in on other links"
)
INBOXES_NBYTES = _limit(
    "INBOXES_NBYTES", "engine", 1 << 30, "of messages that come in on all links; who adds to it is dropped"
)
LEASES = _limit("LEASES", "link", 4096, "pulls of a peer that are under way in managed mode")
UNDECIDED = _limit(
    "UNDECIDED", "link", 4096, "reads that have said Finish, and not yet what their outcome is"
)
OFFERS = _limit("OFFERS", "link", 4096, "pushes and layer-wise tasks that are open")
OFFERS_NBYTES = _limit("OFFERS_NBYTES", "link", 256 << 20, "their lists; a push of 10^6 blocks has 16 MB")
OFFERS_ENGINE_NBYTES = _limit("OFFERS_ENGINE_NBYTES", "engine", 1 << 30, "the lists of all peers' pushes")
SOURCES_NBYTES = _limit(
    "SOURCES_NBYTES",
    "link",
    16 << 20,
    "caches that its pushes may read: some thousand of hundreds of tensors",
)
SOURCES_ENGINE_NBYTES = _limit(
    "SOURCES_ENGINE_NBYTES", "engine", 1 << 30, "those of all peers; who adds to it is dropped"
)
PARTS = _limit("PARTS", "link", 1 << 16, "layers that may be read and wait for it")
JOBS = _limit("JOBS", "link", 8, "threads that read its pushes; others wait in the order of their coming")
PUSH_THREADS = _limit(
    "PUSH_THREADS",
    "engine",
    256,
    "threads that read pushes; an address has as many as are free, a link as many as its address may have more",
)
PUSH_TURN_S = _limit(
    "PUSH_TURN_S",
    "link",
    10.0,
    "of one read of a push, while another link can have no such thread; then it is cut off, of who has most",
)
STRIPES = _limit(
    "STRIPES",
    "engine",
    256,
    "further threads that wide reads over tcp have; a link leaves some to others; what has none is read without",
)
ASKED = _limit("ASKED", "link", 64, "Unlink and Settle that wait for the end of transfers")
LOOKS = _limit("LOOKS", "engine", 500, "a second, of all that wait so, whether the transfers have ended")
TABLE_NBYTES = _limit(
    "TABLE_NBYTES",
    "link",
    512 << 20,
    "our copy of its table: 10^6 keys; what is beyond it is asked for, pull by pull",
)
TABLES_NBYTES = _limit("TABLES_NBYTES", "engine", 2 << 30, "the copies of all tables")
NOTIFICATIONS = _limit(
    "NOTIFICATIONS",
    "engine",
    4096,
    "not fetched yet, 512 MiB of the largest: the contract's; a peer of several may hold as many as are free",
)
CONNECTIONS = _limit("CONNECTIONS", "link", 64, "on which it reads over tcp")
LONG_SELECTOR_NBYTES = _limit(
    "LONG_SELECTOR_NBYTES",
    "field",
    256 << 10,
    "a selector beyond it needs room among the long ones of its link",
)
SELECTORS_NBYTES = _limit(
    "SELECTORS_NBYTES",
    "link",
    32 << 20,
    "long selectors that come in or are served; the next one waits in its socket",
)
SELECTORS_BURST_S = _limit(
    "SELECTORS_BURST_S", "link", 0.1, "spent on long selectors; then they have their share"
)
SELECTORS_ENGINE_NBYTES = _limit(
    "SELECTORS_ENGINE_NBYTES", "engine", 256 << 20, "the long selectors of all links"
)
NIXL_SOURCES_NBYTES = _limit(
    "NIXL_SOURCES_NBYTES",
    "link",
    64 << 20,
    "what NIXL must know of its caches; what is left out is told again",
)
NIXL_SOURCES_ENGINE_NBYTES = _limit(
    "NIXL_SOURCES_ENGINE_NBYTES",
    "engine",
    1 << 30,
    "the same of all peers; a link keeps its latest one in any case",
)
NIXL_SOURCES = _limit(
    "NIXL_SOURCES", "link", 1024, "of its caches that we read; we are told of one before each read"
)
NIXL_TOKENS = _limit("NIXL_TOKENS", "link", 4096, "that its agent remembers, and no more bytes than above")
KNOWN_UNITS = _limit("KNOWN_UNITS", "connection", 64, "selectors that a reader may repeat by their number")
PROOFS = _limit(
    "PROOFS", "engine", 1 << 14, "shown at the same time; a slot that was never used takes no memory"
)
BACKLOG = _limit(
    "BACKLOG", "listener", 512, "peers that dial while this process is held up; the system may cap it"
)
LEASE_S = _limit("LEASE_S", "link", 24 * 3600.0, "for which a peer may hold a lease; nobody waits longer")
READERS = _limit("READERS", "engine", 4096, "that were given shared memory; each costs a descriptor")
SILENT_READERS = _limit(
    "SILENT_READERS", "engine", 64, "of these, that have shown no proof yet; beyond it the oldest is dropped"
)


# ---- the log -----------------------------------------------------------------------------------------------------

LINE_CHARS = _limit("LINE_CHARS", "line", 1000, "of a peer's words in the log")
LINES = _limit(
    "LINES",
    "address and minute",
    1000,
    "warnings about the peers there, and as many lines of INFO; more are counted",
)
REFUSALS = _limit(
    "REFUSALS", "address and minute", 1, "refused links that have a line; more are counted and told"
)
LINES_ENGINE = _limit(
    "LINES_ENGINE",
    "engine and minute",
    5000,
    "of each kind about all peers, what was counted included; one line more tells how many were left out",
)
LINES_S = _limit("LINES_S", "engine", 60.0, "after which what was counted is told")
ADDRESSES = _limit("ADDRESSES", "engine", 1024, "for which lines are counted; beyond it they share one count")
