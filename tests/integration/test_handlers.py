"""What a signal handler raises, which need not be a KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.interrupted import SOME, Call, Pull, PullOne, Push, Send, Two, skip_in_a, strike_all
from tests.support.steps import Steps


class AlarmError(TimeoutError):
    """What handlers of ``signal.alarm`` like to raise: an OSError, which no system has reported."""


class Check(Call):
    def make(self, two: Two) -> None:
        two.reader.check_link_status(1)


@pytest.mark.parametrize("stride", SOME)
@pytest.mark.parametrize("make", [Pull, PullOne, Push, Send, Check], ids=lambda c: c.__name__)
def test_g12_what_a_handler_raises_reaches_the_caller(
    two: Two, make: Callable[[], Call], stride: int
) -> None:
    """As it is, and the link that it came across stays."""
    skip_in_a(two, make)

    def raise_it() -> None:
        raise AlarmError

    def strike(number: int, call: Callable[[], None]) -> object:
        steps = Steps(number, strike=raise_it)
        try:
            steps.run(call)
        except AlarmError:
            assert two.reader.links(), steps.where
            return steps.where
        assert not steps.where, "it was kept from the caller"
        return None

    assert strike_all(two, make(), stride, strike) > 20
