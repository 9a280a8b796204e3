"""The faults that this suite shows to be outlived or named, and where: `ROWS`, by the numbers that docstrings of the tests use.

Saving is rank 0's business alone, so rows 42 and 43, of ranks that save parts, have no test.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS: dict[int, tuple[str, ...]] = {
    # SIGKILL at each system call, and between the steps, of a local save.
    1: ("faults/test_system_calls.py::test_a_save_killed_at_every_system_call_is_there_whole_or_not_at_all",),
    2: ("faults/test_local_commits.py::test_each_named_step_of_a_local_commit",),
    # SIGKILL in a part; after the data; after the manifest.
    3: ("faults/test_multipart_resume.py::test_killed_in_the_middle_of_a_part",),
    4: ("faults/test_interrupted_uploads.py::test_an_upload_killed_at_every_operation_sends_each_object_once",),
    5: ("faults/test_interrupted_uploads.py::test_an_upload_killed_at_every_operation_sends_each_object_once",),
    # Local disks: full, failing, another one, read-only or missing; a queue over its budget; two processes on it.
    6: ("faults/test_full_disk.py::test_training_goes_on_over_a_full_disk",),
    7: ("faults/test_system_calls.py::test_a_save_that_meets_an_error_fails_loudly_and_leaves_nothing",),
    8: ("faults/test_queue_budget.py::test_what_lies_on_another_disk_is_copied_and_synced",),
    9: (
        "faults/test_queue_budget.py::test_a_read_only_tier_is_an_error_before_step_1",
        "faults/test_queue_budget.py::test_a_full_tier_is_an_error_before_step_1",
        "faults/test_queue_budget.py::test_a_tier_that_is_missing_is_made",
    ),
    10: ("faults/test_queue_budget.py::test_an_outage_longer_than_the_queue",),
    11: ("faults/test_queue_budget.py::test_two_processes_drain_one_tier",),
    # A source that its trainer rewrites.
    12: (
        "run/test_intake.py::test_k059_a_file_overwritten_during_its_upload",
        "faults/test_uploads.py::test_a_source_that_changed_is_never_committed",
    ),
    # 503 for a while, for ever; 500, and errors inside a 200.
    13: (
        "faults/test_throttling.py::test_a_store_that_asks_for_less_gets_it",
        "faults/test_throttling.py::test_it_goes_on_with_half_of_what_it_had",
        "faults/test_oss.py::test_throttled_parts",
    ),
    14: (
        "faults/test_throttling.py::test_failing_for_ever_ends_with_the_deadline",
        "faults/test_throttling.py::test_what_a_store_does_not_take_stays_pending",
    ),
    15: (
        "backends/test_transfers.py::test_uploads_outlive_faults",
        "backends/test_transfers.py::test_a_completion_that_failed_in_a_200",
        "faults/test_copies_and_deletes.py::test_a_copy_in_one_request",
    ),
    # Refused connections, names that do not resolve, TLS; resets.
    16: (
        "faults/test_unreachable_stores.py::test_a_store_that_is_down_for_a_while",
        "faults/test_unreachable_stores.py::test_an_endpoint_that_does_not_speak_tls",
        "faults/test_unreachable_stores.py::test_a_certificate_that_nobody_knows",
        "backends/test_errors.py::test_a_name_that_does_not_resolve",
    ),
    17: ("backends/test_transfers.py::test_uploads_outlive_faults",),
    # Lost answers: to data, to the manifest, to the end of an upload in parts; 409 for a race.
    18: ("backends/test_transfers.py::test_uploads_outlive_faults",),
    19: (
        "faults/test_uploads.py::test_a_manifest_whose_request_failed_is_there_once",
        "faults/test_uploads.py::test_a_lost_answer_to_the_manifest_is_settled_by_reading_it_back",
    ),
    20: (
        "faults/test_lying_stores.py::test_an_upload_that_is_gone_because_it_was_completed",
        "faults/test_lying_stores.py::test_an_upload_that_is_gone_because_it_was_aborted",
        "faults/test_multipart_resume.py::test_a_lost_answer_to_the_last_request",
    ),
    21: (
        "faults/test_lying_stores.py::test_a_race_at_the_end_of_an_upload_begins_it_anew",
        "faults/test_lying_stores.py::test_a_race_of_a_put_is_tried_again",
    ),
    # Connections that stand still or trickle, and what training notices of it; slow links.
    22: (
        "faults/test_slow_stores.py::test_a_store_that_stops_reading_is_cut",
        "faults/test_slow_stores.py::test_a_write_without_an_answer",
        "faults/test_lying_stores.py::test_a_connection_that_trickles_is_cut",
        "cases/test_k_transfers.py::test_k021_a_store_that_fails_for_a_while_is_not_noticed_by_the_training",
    ),
    23: (
        "faults/test_slow_stores.py::test_a_slow_link_is_not_taken_for_a_dead_one",
        "faults/test_transfer_memory.py::test_nor_on_the_link",
    ),
    # Damage on the way up, at rest, on the way down.
    24: ("faults/test_lying_stores.py::test_damage_on_the_way_up_again_and_again",),
    25: (
        "run/test_verify.py::test_damage_at_rest",
        "run/test_verify.py::test_a_thousand_flipped_bits",
        "damage/test_matrix.py::test_in_a_bucket",
    ),
    26: (
        "run/test_verify.py::test_damage_at_rest",
        "faults/test_lying_stores.py::test_an_object_of_another_size",
    ),
    27: (
        "faults/test_lying_stores.py::test_a_body_that_is_cut_goes_on_where_it_broke",
        "faults/test_lying_stores.py::test_damage_on_the_way_down",
    ),
    28: (
        "faults/test_odd_runs.py::test_a_manifest_that_cannot_be_read",
        "cli/test_damaged_manifests.py::test_unreadable_manifest_is_shown_and_named",
    ),
    29: (
        "run/test_verify.py::test_damage_at_rest",
        "damage/test_ways.py::test_k045_a_missing_sampler_state",
    ),
    # Credentials that expire, or are refused for good; a wrong clock.
    30: (
        "faults/test_s3_credentials.py::test_revoked_in_the_middle_of_an_upload",
        "faults/test_oss.py::test_keys_that_expire_in_the_middle_of_an_upload",
    ),
    31: (
        "faults/test_s3_credentials.py::test_refused_for_good",
        "faults/test_oss.py::test_a_refusal_for_good_makes_no_hot_loop",
        "faults/test_uploads.py::test_refused_credentials_do_not_spin",
    ),
    32: (
        "backends/test_s3data.py::test_k123_a_wrong_clock",
        "faults/test_oss.py::test_k123_a_wrong_clock",
        "backends/test_s3data.py::test_k123_a_request_that_was_held_back",
        "faults/test_oss.py::test_k123_a_request_that_was_held_back",
    ),
    # Conditions that are ignored, on S3 and on versioned OSS buckets; bodies that OSS's S3 endpoint refuses.
    33: (
        "faults/test_odd_runs.py::test_a_store_that_ignores_the_condition",
        "run/test_gc.py::test_two_passes_without_create_only",
    ),
    34: (
        "faults/test_oss.py::test_a_versioned_bucket_has_no_create_only",
        "run/test_gc.py::test_a_store_that_has_lost_create_only",
    ),
    35: ("backends/test_store_options_s3.py::test_a_store_that_refuses_chunked_bodies",),
    # Writers beside each other: of one step, of one save, and gc.
    36: (
        "faults/test_odd_runs.py::test_a_process_that_was_replaced_and_goes_on",
        "faults/test_managers.py::test_a_superseded_attempt_commits_and_prunes_nothing",
    ),
    37: ("faults/test_lying_stores.py::test_two_writers_of_one_save",),
    38: ("faults/test_collecting.py::test_a_slow_writer_goes_on_under_a_new_name",),
    # Prune: killed, beside a reader, refused for some keys.
    39: ("faults/test_pruning.py::test_a_prune_killed_after_each_operation_is_finished_by_the_next",),
    40: (
        "faults/test_pruning.py::test_a_reader_whose_checkpoint_is_pruned_takes_the_next_older",
        "faults/test_pruning.py::test_a_checkpoint_that_is_read_on_this_machine_is_spared",
        "run/test_prune.py::test_tag_set_in_the_last_moment_holds",
    ),
    41: (
        "faults/test_copies_and_deletes.py::test_more_than_a_batch_is_removed_in_batches",
        "faults/test_copies_and_deletes.py::test_keys_refused_inside_a_success_on_the_wire",
        "faults/test_copies_and_deletes.py::test_what_is_refused_for_good_is_reported_and_the_rest_removed",
    ),
    # The end of the program: signals, the grace, exceptions; workers; a dead uploader; metrics that are no numbers.
    44: (
        "faults/test_preemption.py::test_in_a_step",
        "faults/test_preemption.py::test_in_a_save",
        "faults/test_preemption.py::test_in_an_evaluation",
        "faults/test_preemption.py::test_during_an_upload",
        "faults/test_preemption.py::test_twice",
        "faults/test_preemption.py::test_to_the_whole_process_group",
    ),
    45: ("faults/test_preemption.py::test_the_machine_is_gone_before_the_queue_is_empty",),
    46: (
        "faults/test_endings.py::test_a_program_that_ends_without_close_has_its_queue_drained",
        "cases/test_k_endings.py::test_k053_a_program_that_ends_by_itself_has_all_its_saves_committed",
    ),
    47: ("faults/test_dataloader_workers.py::test_workers_live_beside_the_uploader",),
    48: (
        "faults/transfer_process/test_deaths.py::test_the_uploader_thread_that_dies_is_started_again_by_the_next_save",
        "faults/transfer_process/test_deaths.py::test_a_process_that_was_killed_is_started_again_at_once",
    ),
    49: ("core/test_retention.py::test_k061_nan_goes_first_and_among_equals_the_earlier_stays",),
    # Odd names and sizes, many parts, long listings; what a manifest may not name; targets that exist.
    50: (
        "faults/test_many_and_odd.py::test_odd_names_round_trip",
        "faults/test_many_and_odd.py::test_five_gibibytes_and_a_byte_go_up",
        "faults/test_many_and_odd.py::test_five_gibibytes_and_a_byte_come_down",
    ),
    51: (
        "faults/test_many_and_odd.py::test_one_part_more_than_there_may_be",
        "faults/test_many_and_odd.py::test_as_many_parts_as_there_may_be",
        "faults/test_many_and_odd.py::test_a_hundred_thousand_manifests_are_listed_in_pages",
    ),
    52: ("cases/test_k_artifacts.py::test_k047_names_that_lead_out_of_the_target",),
    53: (
        "run/test_resume.py::test_target_that_holds_something_else_is_refused",
        "run/test_resume.py::test_interrupted_download_is_taken_up",
        "run/test_resume.py::test_leftover_of_another_checkpoint_never_ends_in_the_result",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_has_its_tests(row: int) -> None:
    """They are there under these names."""
    for place in ROWS[row]:
        file, _, name = place.partition("::")
        assert re.search(rf"^ *def {name}\(", (TESTS / file).read_text(), re.MULTILINE), place
