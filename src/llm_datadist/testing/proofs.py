"""A conformance suite for what a transport shows of itself: a proof for one connection (``Transport.endpoint``).

Strategy: a transport's author gives two of them, an owner and a reader that can reach it, as the pytest fixture
``two``, and subclasses ``ProofConformance``. What the suite cannot know is how an endpoint of that transport
is forged: test yourself that one which names the place of another process, with the right bytes, is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.testing.board import soon
from llm_datadist.transports.seam import PeerEndpoint, Transport, TransportUnavailable

PROOF = b"1" * PROOF_NBYTES
OTHER = b"2" * PROOF_NBYTES


class Two(NamedTuple):
    """Two transports of one kind; the control loops of both, if there are any, are served meanwhile."""

    owner: Transport
    reader: Transport


class ProofConformance:
    """What every transport must do by which a peer could show memory that is not its own."""

    def test_g16_the_other_end_of_the_connection_is_read(self, two: Two) -> None:
        """Several handshakes at a time do not disturb each other."""
        first, second = two.owner.endpoint(PROOF), two.owner.endpoint(OTHER)
        assert not refusal(two.reader, second, OTHER)
        two.owner.hide(OTHER)
        assert not refusal(two.reader, first, PROOF)
        two.owner.hide(PROOF)

    def test_g16_what_is_shown_for_another_connection_is_refused(self, two: Two) -> None:
        """By a peer that names the owner as itself: the owner has another challenge, or another connection."""
        blob = two.owner.endpoint(OTHER)
        assert refusal(two.reader, blob, PROOF)
        assert refusal(two.reader, blob, b"")
        two.owner.hide(OTHER)

    def test_g16_what_is_hidden_is_refused(self, two: Two) -> None:
        """When its handshake is over; hiding is idempotent."""
        blob = two.owner.endpoint(PROOF)
        two.owner.hide(PROOF)
        two.owner.hide(PROOF)
        two.owner.hide(OTHER)
        assert refusal(two.reader, blob, PROOF)
        assert not refusal(two.reader, two.owner.endpoint(PROOF), PROOF)
        two.owner.hide(PROOF)


def refusal(reader: Transport, blob: bytes, proof: bytes) -> str:
    """Why the peer is not reached, whether that is known at once or later; "" if it is."""
    peer = PeerEndpoint(1, blob, b"t" * 16, None, lambda count: None, proof)
    try:
        channel = reader.open(peer, deadline=soon())
    except TransportUnavailable as exc:
        return str(exc)
    try:
        settle = getattr(channel, "settle", None)  # of a PartialChannel
        if settle is not None and not settle(deadline=soon()):
            return "no answer"
        return str(getattr(channel, "refusal", ""))
    finally:
        channel.close()
