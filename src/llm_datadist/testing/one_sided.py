"""The conformance suites of transports that read by address: words, and what is within reach.

Used as ``testing.transports.TransportConformance``, which they include.
"""

from __future__ import annotations

from typing import Protocol, cast

from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import PAGE, PROMPT_S, board_of, check_fault, extents, soon
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.testing.transports import Pair, TransportConformance
from llm_datadist.transports.seam import Fault, FaultKind, OneSidedChannel, PartialChannel


class OneSidedConformance(TransportConformance):
    """What a transport that reads by address must do besides: words."""

    def test_word_has_the_value_of_its_last_store(self, pair: Pair) -> None:
        """Also at the end of a page, and each of its bytes."""
        base = pair.map_sparse(2 * PAGE)
        channel = one_sided(pair)
        for address in (base, base + 8, base + PAGE - 8):
            assert channel.read_word(address, deadline=soon()) == 0
            for value in (1, 0x0102030405060708, (1 << 64) - 1, 0):
                pair.write(address, value.to_bytes(8, "little"))
                assert channel.read_word(address, deadline=soon()) == value
            assert channel.read_word(address + 8, deadline=soon()) == 0

    def test_word_of_a_stopped_owner(self, pair: Pair) -> None:
        """Its Python is not needed."""
        base = pair.map_sparse(PAGE)
        pair.write(base, b"\x07")
        pair.stop()
        try:
            watch = Stopwatch()
            assert one_sided(pair).read_word(base, deadline=soon()) == 7
            assert watch.within(PROMPT_S)
        finally:
            pair.resume()

    def test_word_where_there_is_nothing(self, pair: Pair) -> None:
        """A SOURCE fault; the channel is good for the next one."""
        _check_kind(one_sided(pair).read_word(8, deadline=soon()), FaultKind.SOURCE)
        assert one_sided(pair).read_word(pair.map_sparse(PAGE), deadline=soon()) == 0

    def test_t3_word_of_an_owner_that_is_gone(self, doomed: Pair) -> None:
        """PEER_LOST."""
        base = doomed.map_sparse(PAGE)
        assert one_sided(doomed).read_word(base, deadline=soon()) == 0
        doomed.kill()
        _check_kind(one_sided(doomed).read_word(base, deadline=soon()), FaultKind.PEER_LOST)

    def test_word_on_a_closed_channel(self, doomed: Pair) -> None:
        """CANCELLED."""
        base = doomed.map_sparse(PAGE)
        doomed.channel.close()
        _check_kind(one_sided(doomed).read_word(base, deadline=soon()), FaultKind.CANCELLED)


class PartialPair(Pair, Protocol):
    """A pair whose channel reaches what ``allocate`` and ``map_sparse`` map, and not all of the owner."""

    def beyond(self) -> int:
        """Maps 1 MiB at the owner that the channel does not reach; its address."""


class PartialConformance(OneSidedConformance):
    """What a transport to some of the peer's memory must do besides: say what it reaches.

    What the owner unmaps may live on in a mapping of the reader's (words tell that it is over).
    """

    def test_unreadable_source_is_a_source_fault(self, pair: Pair) -> None:
        """Beyond its reach; the channel is good for the next read."""
        beyond = partial_pair(pair).beyond()
        with board_of(pair, [16 * PAGE], [16 * PAGE]) as board:
            for bases in (
                [beyond],
                [beyond + PAGE - 8],
                [board.bases[0], beyond],
                [8],
                [(1 << 64) - 8 * PAGE],
            ):
                there = extents(bases, [(0, 7), (5 * PAGE, PAGE)])
                here = extents(board.here, [(0, there.nbytes)])
                progress = pair.channel.read(Segments(there, here)).wait(deadline=soon())
                check_fault(progress, FaultKind.SOURCE, there.nbytes)
                board.check_only_changed([(0, there.nbytes)])
                board.refill()
            board.check_read([(5 * PAGE, 11 * PAGE)], [(0, 11 * PAGE)])

    def test_covers_what_it_reads_and_nothing_else(self, pair: Pair) -> None:
        """Every tensor and every run counts, and so do numbers that no address space has."""
        covers = partial(pair).covers
        beyond = partial_pair(pair).beyond()
        base = pair.map_sparse(1 << 20)
        runs = [(7, 100), (0, 8), (5 * PAGE, 4 * PAGE)]
        assert covers(extents([base], runs)) and covers(extents([base, base + PAGE, base + 9], runs))
        assert covers(extents([], runs)) and covers(extents([base], [])) and covers(extents([8], []))
        assert covers(extents([beyond], [])), "nothing is always within reach"
        for bases in ([beyond], [base, beyond], [beyond, base], [8], [base, (1 << 64) - 8]):
            assert not covers(extents(bases, runs))
        for wide in ([(0, 1 << 50)], [(1 << 50, 8)], [(0, 8), ((1 << 64) - 8, 16)], [((1 << 64) - base, 8)]):
            assert not covers(extents([base], wide))

    def test_closed_channel_covers_nothing(self, doomed: Pair) -> None:
        """And reads nothing."""
        base = doomed.map_sparse(PAGE)
        assert partial(doomed).covers(extents([base], [(0, PAGE)]))
        doomed.channel.close()
        assert not partial(doomed).covers(extents([base], [(0, PAGE)]))


def one_sided(pair: Pair) -> OneSidedChannel:
    """Its channel, which reads by address."""
    return cast(OneSidedChannel, pair.channel)


def partial(pair: Pair) -> PartialChannel:
    """Its channel, which reaches some memory."""
    return cast(PartialChannel, pair.channel)


def partial_pair(pair: Pair) -> PartialPair:
    """The pair, of a transport to some memory."""
    return cast(PartialPair, pair)


def _check_kind(answer: int | Fault, kind: FaultKind) -> None:
    if not isinstance(answer, Fault) or answer.kind is not kind or not answer.text:
        raise AssertionError(f"the word should have been a fault of {kind}; it is {answer}")
