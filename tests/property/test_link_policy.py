"""The policy of links under every order of deliveries: one link, the same on both sides, no dial forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_datadist.status import LLMStatusCode
from tests.support.two_tables import World

CHOICES = st.lists(st.integers(0, 15), max_size=60)


def run(world: World, choices: list[int]) -> None:
    for choice in choices:
        events = world.events()
        if events:
            events[choice % len(events)]()
    world.settle()


@settings(max_examples=300)
@given(first=st.sampled_from([0, 1]), before=CHOICES, after=CHOICES, sees_ends=st.booleans())
def test_l6_both_dial_at_the_same_moment(
    first: int, before: list[int], after: list[int], sees_ends: bool
) -> None:
    world = World(sees_ends=sees_ends)
    a, b = world.nodes
    world.nodes[first].dial(1, 2 - first)
    for choice in before[:6]:
        events = world.events()
        if events:
            events[choice % len(events)]()
    world.nodes[1 - first].dial(1, first + 1)
    run(world, after)
    assert a.results == {1: LLMStatusCode.LLM_SUCCESS} == b.results
    assert a.link is not None and a.link == b.link
    assert a.open == {a.link} == b.open, "no other connection stays"
    assert a.refusals == 0, "the authority's dial is not refused: so there is no endless round of refusals"


@settings(max_examples=200)
@given(
    choices=CHOICES, dials=st.lists(st.sampled_from([0, 1]), min_size=2, max_size=6), sees_ends=st.booleans()
)
def test_many_dials_from_both_sides_make_one_link(
    choices: list[int], dials: list[int], sees_ends: bool
) -> None:
    world = World(sees_ends=sees_ends)
    for ticket, side in enumerate(dials):
        world.nodes[side].dial(ticket, 2 - side)
    run(world, choices)
    a, b = world.nodes
    assert a.link is not None and a.link == b.link
    for side, node in enumerate(world.nodes):
        codes = sorted(node.results.values(), key=lambda code: code is not LLMStatusCode.LLM_SUCCESS)
        count = dials.count(side)
        wanted = [LLMStatusCode.LLM_SUCCESS][:count] + [LLMStatusCode.LLM_ALREADY_LINK] * (count - 1)
        assert codes == wanted


@settings(max_examples=300)
@given(loser=st.sampled_from([0, 1]), dialler=st.sampled_from([0, 1]), choices=CHOICES)
def test_a_side_that_lost_its_link_unnoticed_dials_again(
    loser: int, dialler: int, choices: list[int]
) -> None:
    world = World()
    world.nodes[dialler].dial(1, 2 - dialler)
    world.settle()
    old = world.nodes[loser].link
    assert old is not None
    world.nodes[loser].close(old, unnoticed=True)
    world.nodes[loser].dial(2, 2 - loser)
    run(world, choices)
    a, b = world.nodes
    assert world.nodes[loser].results[2] == LLMStatusCode.LLM_SUCCESS
    assert a.link is not None and a.link == b.link and a.link != old


class Policy(RuleBasedStateMachine):
    """Dials, drops, losses and deliveries in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(retry_count=3)
        self.tickets = 0

    @initialize(sees_ends=st.booleans())
    def begin(self, sees_ends: bool) -> None:
        self.world = World(retry_count=3, sees_ends=sees_ends)

    @rule(side=st.sampled_from([0, 1]))
    def dial(self, side: int) -> None:
        self.tickets += 1
        self.world.nodes[side].dial(self.tickets, 2 - side)

    @rule(side=st.sampled_from([0, 1]), unnoticed=st.booleans())
    def lose(self, side: int, unnoticed: bool) -> None:
        node = self.world.nodes[side]
        if node.link is not None:
            node.close(node.link, unnoticed=unnoticed)

    @rule(side=st.sampled_from([0, 1]), choice=st.integers(0, 20))
    def expire(self, side: int, choice: int) -> None:
        node = self.world.nodes[side]
        ticket = choice % (self.tickets + 1)
        node.apply(node.table.expired(ticket, LLMStatusCode.LLM_TIMEOUT, "time"))

    @precondition(lambda self: self.world.events(only_true_timeouts=False))
    @rule(choices=st.lists(st.integers(0, 30), min_size=1, max_size=8))
    def happen(self, choices: list[int]) -> None:
        for choice in choices:
            events = self.world.events(only_true_timeouts=False)
            if events:
                events[choice % len(events)]()

    @invariant()
    def a_link_is_an_open_connection(self) -> None:
        for node in self.world.nodes:
            assert node.link is None or node.link in node.open

    def teardown(self) -> None:
        self.world.settle()
        a, b = self.world.nodes
        assert len(a.results) + len(b.results) == self.tickets, "every dial has its result"
        for node, other in ((a, b), (b, a)):
            assert node.link is None or node.link == other.link or node.link not in other.open
            assert not node.dial_of and not node.retries and not node.probes
            assert node.link is not None or not node.table._peers, "nothing is kept of what is gone"
            assert not node.table._accepted.keys() & node.open
        for side in (0, 1):  # whatever has happened, a fresh dial makes it right again
            self.world.nodes[side].dial(-1 - side, 2 - side)
            self.world.settle()
        assert a.link is not None and a.link == b.link


TestPolicy = Policy.TestCase
TestPolicy.settings = settings(max_examples=100, stateful_step_count=40)
