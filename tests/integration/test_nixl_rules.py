"""The rules of transfers hold on transport ``nixl``: tests that run on the other transports, run on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import (
    test_allocated,
    test_background,
    test_block_indices,
    test_endings,
    test_layerwise,
    test_layouts,
    test_link_table,
    test_notifications,
    test_registration,
    test_remap,
    test_stale_data,
    test_threads,
    test_timeouts,
    test_unlike_caches,
)
from tests.support.nixl_engines import BOTH, NIXL_A, NIXL_B, QUIET
from tests.support.nixl_pair import need_nixl
from tests.support.pair import Combo, Pair, make_pair
from tests.support.pool import Spawner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHOSEN = {
    test_allocated: (
        "a_host_allocation_is_remote_accessible",
        "allocated_caches_are_source_and_destination",
        "layers_are_pushed_to_the_addresses_of_an_allocated_cache",
        "pushes_between_allocated_caches",
    ),
    test_background: (
        "pulls",
        "pushes",
    ),
    test_block_indices: (
        "b1_every_index_of_a_pull_is_checked",
        "b1_every_index_of_a_push_is_checked",
        "b3_a_push_of_a_larger_slot_is_refused",
        "b3_block_bytes_of_both_sides_are_compared",
        "b3_sizes_outside_the_strides_are_refused",
        "b3_slots_use_each_sides_own_stride",
        "b4_the_tail_block_gets_what_is_left_of_the_slot",
        "b5_long_lists_of_scattered_blocks",
        "b6_no_boundary_of_chunks_shows",
        "b7_order_and_repetition_are_kept",
    ),
    test_endings: (
        "finalize_ends_within_two_seconds_with_work_queued",
        "finalize_tells_the_peers",
    ),
    test_layerwise: (
        "a1_a_layer_counts_as_sent_when_it_is_there",
        "a5_layers_correspond_by_position",
        "a_cancelled_task",
        "a_slot_goes_into_blocks_in_pieces",
        "a_slot_goes_to_a_slot",
    ),
    test_layouts: (
        "y1_all_tensors_of_a_push_without_a_range",
        "y1_one_tensor_per_layer",
        "y4_any_placement_to_any",
    ),
    test_link_table: (
        "a_killed_peer_is_noticed_at_once",
        "a_link_serves_both_directions",
        "a_link_to_myself",
    ),
    test_notifications: (
        "pulls_notify_their_owner",
        "pushes_notify_their_destination",
    ),
    test_registration: (
        "m2_any_alignment_on_either_side",
        "m3_a_cache_of_many_tensors",
    ),
    test_remap: (
        "a_reader_of_the_old_generation_notices",
        "peers_read_the_new_memory_under_the_same_id_and_key",
    ),
    test_stale_data: (
        "memory_that_is_no_longer_mapped_fails_and_the_link_lives",
        "s3_a_larger_mapping_at_the_same_address",
        "s4_a_cache_registered_after_linking_is_seen_at_once",
    ),
    test_threads: ("c3_any_thread_may_use_what_another_made",),
    test_timeouts: (
        "t2_a_push_to_a_stopped_peer_never_begins",
        "t2_a_stopped_owner_lets_the_call_time_out",
    ),
    test_unlike_caches: ("a_destination_that_cannot_be_written_is_refused",),
}
for _module, _names in CHOSEN.items():
    for _name in _names:
        globals()[f"test_{_name}"] = getattr(_module, f"test_{_name}")


@pytest.fixture
def spawn(_leaves_nothing: None) -> Iterator[Spawner]:
    """Processes of this module's own; afterwards each must have given everything back."""
    need_nixl()
    spawner = Spawner(QUIET)
    yield spawner
    left = spawner.close()
    assert not left, "; ".join(left)


@pytest.fixture(params=BOTH, ids=str)
def combo(request: pytest.FixtureRequest) -> Combo:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(spawn: Spawner, combo: Combo) -> Pair:
    return make_pair(spawn, combo)


@pytest.fixture(params=[NIXL_A], ids=str)
def pair_a(spawn: Spawner, request: pytest.FixtureRequest) -> Pair:
    return make_pair(spawn, request.param)


@pytest.fixture(params=[NIXL_B], ids=str)
def pair_b(spawn: Spawner, request: pytest.FixtureRequest) -> Pair:
    return make_pair(spawn, request.param)


@pytest.mark.parametrize("kind", ["blocks", "id"])
def test_s1_a_withdrawn_cache_is_not_read(pair: Pair, kind: str) -> None:
    test_stale_data.test_s1_a_withdrawn_cache_is_not_read(pair, kind)


def test_s1_a_withdrawn_request_is_not_read(pair_a: Pair) -> None:
    test_stale_data.test_s1_a_withdrawn_cache_is_not_read(pair_a, "request")


def test_s2_a_pull_holds_one_generation_only(pair_a: Pair) -> None:
    """In mode B no cache of this test lives as long as a first read of it over NIXL takes."""
    test_stale_data.test_s2_a_pull_holds_one_generation_only(pair_a, 2.0, 10)
