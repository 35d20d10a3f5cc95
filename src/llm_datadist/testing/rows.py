"""The conformance suite of channels that have a shorter way for reads that are repeated (``seam.RowsChannel``).

Used as ``testing.transports.TransportConformance``. Both fixtures must be of a kind for which ``rows`` is not None.
"""

from __future__ import annotations

import threading
import time
from typing import cast

import numpy as np

from llm_datadist.testing.board import PAGE, PROMPT_S, Board, board_of, extents, soon, uncut
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.testing.transports import Pair
from llm_datadist.transports.seam import Rows, RowsChannel

_UNITS = 40
_TOO_MUCH = 64 << 20


class RowsConformance:
    """What repeated reads of one unit of each tensor must do."""

    def test_b7_any_unit_of_any_number_of_tensors(self, pair: Pair) -> None:
        """The bytes of those units and no others, also of odd sizes."""
        rng = np.random.default_rng(3)
        for tensors in (1, 2, 60):
            for nbytes in (1, 7, 4096, 10_001):
                with board_of(pair, [_UNITS * nbytes] * tensors, [_UNITS * nbytes] * tensors) as board:
                    rows = _rows(board, nbytes)
                    for there, here in rng.integers(0, _UNITS, (20, 2)).tolist():
                        _check(board, rows, there * nbytes, here * nbytes, nbytes)

    def test_every_alignment(self, pair: Pair) -> None:
        """Offsets need not be multiples of the size."""
        with board_of(pair, [8 * PAGE] * 2, [8 * PAGE] * 2) as board:
            rows = _rows(board, 4097)
            for there in (0, 1, 7, 0x200, 4095):
                for here in (0, 1, 7, 0x200, 4095):
                    _check(board, rows, there, here, 4097)

    def test_a_late_read_moves_nothing(self, pair: Pair) -> None:
        """The deadline is looked at before the first byte."""
        with board_of(pair, [PAGE], [PAGE]) as board:
            if _rows(board, 100).read(0, 0, deadline=time.monotonic(), on_cut=uncut):
                raise AssertionError("a read after its deadline says that all bytes have come")
            board.check_only_changed([])

    def test_threads_use_one_preparation(self, pair: Pair) -> None:
        """Each gets its own unit, all at once."""
        threads, nbytes, turns = 8, 4096, 200
        with board_of(pair, [threads * nbytes] * 3, [threads * nbytes] * 3) as board:
            rows, failed = _rows(board, nbytes), []

            def work(unit: int) -> None:
                for _ in range(turns):
                    if not rows.read(
                        unit * nbytes, (threads - 1 - unit) * nbytes, deadline=soon(), on_cut=uncut
                    ):
                        failed.append(unit)

            working = [threading.Thread(target=work, args=(unit,)) for unit in range(threads)]
            for thread in working:
                thread.start()
            for thread in working:
                thread.join()
            if failed:
                raise AssertionError(f"reads of the units {sorted(set(failed))} failed")
            runs = [(unit * nbytes, nbytes) for unit in range(threads)]
            board.check_moved(runs, runs[::-1])

    def test_bad_addresses_are_an_answer(self, pair: Pair) -> None:
        """Anywhere in the address space: no short way, or reads that fail and write nothing."""
        with board_of(pair, [PAGE], [PAGE]) as board:
            for base in (8, 1 << 47, (1 << 63) - PAGE, (1 << 64) - PAGE, (1 << 64) - 8):
                for bases in ([base], [board.bases[0], base]):
                    here = [board.here[0]] * len(bases)
                    rows = _channel(board).rows(
                        extents(bases, [(0, PAGE)]), extents(here, [(0, PAGE)]), PAGE // 2
                    )
                    if rows is not None and rows.read(PAGE // 2, 0, deadline=soon(), on_cut=uncut):
                        raise AssertionError(f"a read at {base:#x} says that all bytes have come")
                    board.check_only_changed([(0, PAGE // 2)])

    def test_what_takes_longer_has_no_short_way(self, pair: Pair) -> None:
        """Nothing that one short step does not move."""
        with board_of(pair, [PAGE], [PAGE]) as board:
            for tensors, nbytes in ((1, _TOO_MUCH), (100_000, 8), (1, 0)):
                whole = [(0, max(PAGE, nbytes))]
                there, here = extents(board.bases * tensors, whole), extents(board.here * tensors, whole)
                if _channel(board).rows(there, here, nbytes) is not None:
                    raise AssertionError(f"a short way for {tensors} tensors of {nbytes} bytes each")

    def test_a_stopped_owner_is_no_matter(self, pair: Pair) -> None:
        """Its Python is not needed."""
        with board_of(pair, [PAGE], [PAGE]) as board:
            rows = _rows(board, 100)
            pair.stop()
            try:
                watch = Stopwatch()
                _check(board, rows, 7, 9, 100)
                if not watch.within(PROMPT_S):
                    raise AssertionError("a read of a stopped owner took its time")
            finally:
                pair.resume()

    def test_t3_an_owner_that_is_gone(self, doomed: Pair) -> None:
        """Its memory may still be there; the read fails."""
        board = Board(doomed, [PAGE], [PAGE])
        rows = _rows(board, 100)
        _check(board, rows, 0, 0, 100)
        doomed.kill()
        if rows.read(0, 0, deadline=soon(), on_cut=uncut):
            raise AssertionError("a read of an owner that is gone says that all bytes have come")
        board.check_only_changed([(0, 100)])
        board.close_here()

    def test_a_closed_channel(self, doomed: Pair) -> None:
        """Nothing is read any more, and nothing is prepared that could be."""
        with board_of(doomed, [PAGE], [PAGE]) as board:
            rows = _rows(board, 100)
            doomed.channel.close()
            whole = [(0, PAGE)]
            late = _channel(board).rows(extents(board.bases, whole), extents(board.here, whole), 100)
            for each in (rows, late):
                if each is not None and each.read(0, 0, deadline=soon(), on_cut=uncut):
                    raise AssertionError("a read on a closed channel says that all bytes have come")
            board.check_only_changed([])


def _channel(board: Board) -> RowsChannel:
    return cast(RowsChannel, board.pair.channel)


def _rows(board: Board, nbytes: int) -> Rows:
    """Reads of units between all tensors of a board."""
    rows = _channel(board).rows(board.whole_source(), board.whole_destination(), nbytes)
    if rows is None:
        raise AssertionError("this channel has no short way")
    return rows


def _check(board: Board, rows: Rows, there: int, here: int, nbytes: int) -> None:
    if not rows.read(there, here, deadline=soon(), on_cut=uncut):
        raise AssertionError(f"{nbytes} bytes from {there} to {here} did not come")
    board.check_moved([(there, nbytes)], [(here, nbytes)])
