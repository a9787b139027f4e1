"""Every bound of ``amqp_rt.limits``: input at the bound is accepted, input above it has a fixed answer.
Tests of the bounds on every transport, for clients and for servers, are in ``test_doors.py``.

``PROVED_BY`` names for each bound the tests that reach it, here and elsewhere. A bound without a
test, and a test that is not there, fail.
"""

from __future__ import annotations

import ast
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from brokers import World
from hypothesis import given, settings
from hypothesis import strategies as st
from sanity import check
from wire import (
    BEGIN,
    OPEN,
    begun,
    closed_with,
    detached_with,
    ended_with,
    frame,
    kinds,
    opened,
    said,
    server,
    transfer,
)

from amqp_rt.broker.nodes import Queue
from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    Attach,
    Begin,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslOutcome
from amqp_rt.events import Closed, ConnectionFailed, LoginRequested, Opened
from amqp_rt.fronts import amqp10
from amqp_rt.limits import DEFAULT_LIMITS, KIB, MIB, Limits
from amqp_rt.net.traces.octets import Raw, composite, encode, encode_frame
from amqp_rt.outcomes import ACCEPTED, Error, Received
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.unsettled import Unsettled

pytestmark = pytest.mark.attack

HERE = "abuse/test_limits.py::"
RABBIT = "../plugins/rabbitmq/tests/"
PROVED_BY: dict[str, tuple[str, ...]] = {
    # Enforced by the engines.
    "frame_size_before_open": (f"{HERE}test_frame_size_before_open",),
    "frame_size_max": (f"{HERE}test_frame_size_max",),
    "message_size_max": (f"{HERE}test_message_size_max",),
    "streaming_message_size_max": (f"{HERE}test_streaming_message_size_max",),
    "channel_max": (f"{HERE}test_channel_max", f"{HERE}test_sessions_of_both_sides"),
    "exchanges_max": ("broker/test_bindings.py::test_exchanges_and_bindings_are_counted",),
    "bindings_max": ("broker/test_bindings.py::test_exchanges_and_bindings_are_counted",),
    "bindings_listed_max": (
        f"{RABBIT}test_rabbitmq_bindings.py::test_lists_of_bindings_have_a_limit",
    ),
    "management_pairs_max": (
        f"{RABBIT}test_rabbitmq_bounds.py::test_pairs_of_a_connection_have_a_limit",
    ),
    "management_bytes_max": (
        f"{RABBIT}test_rabbitmq_bounds.py::test_requests_without_reading_the_answers_end_their_link",
        f"{RABBIT}test_rabbitmq_bounds.py::test_an_answer_that_is_too_large_ends_its_link",
    ),
    "scoped_bindings_max": (
        "broker/test_owned_queues.py::test_scoped_bindings_end_with_their_owner",
    ),
    "last_message_max": (
        "broker/test_last_messages.py::test_what_is_remembered_counts_and_ends_with_its_exchange",
    ),
    "branches_max": ("broker/test_branches.py::test_there_are_so_many_branches_and_no_more",),
    "branches_user_max": ("broker/test_branches.py::test_one_user_leaves_places_to_others",),
    "branch_s": ("broker/test_branches.py::test_a_timeout_counts_from_when_it_is_set",),
    "branch_timeout_max_s": ("broker/test_branches.py::test_a_timeout_has_a_bound_and_a_branch",),
    "branch_kept_s": (
        "broker/test_branches.py::test_a_branch_that_takes_too_long_is_undone_at_once_and_remembered_for_a_while",
    ),
    "log_batch_bytes_max": (
        "broker/test_log_batches.py::test_one_credit_is_one_batch_of_bounded_size",
    ),
    "batch_messages_max": ("broker/test_staging_batches.py",),
    "handle_max": (f"{HERE}test_handle_max", f"{HERE}test_links_without_an_answer"),
    "nesting_max": (f"{HERE}test_nesting_max",),
    "elements_max": (f"{HERE}test_elements_max",),
    "session_window": (f"{HERE}test_session_window",),
    "session_window_bytes": (
        f"{HERE}test_session_window_bytes_of_unfinished_messages",
        f"{HERE}test_session_window_bytes_of_unread_streams",
    ),
    "unsettled_max": (
        f"{HERE}test_unsettled_max_of_what_comes",
        f"{HERE}test_unsettled_max_of_what_goes",
        f"{HERE}test_unsettled_max_of_a_map",
    ),
    "early_deliveries_max": (
        "core/test_early.py::test_at_the_bound_and_above_it",
        "core/test_early.py::test_what_is_held_is_bounded_and_then_judged_like_the_rest",
    ),
    "resume_sections_max": (f"{HERE}test_resume_sections_max",),
    # Enforced by the HTTP door.
    "http_sessions_max": (
        "../plugins/console/tests/test_http_limits.py::test_sessions_are_bounded",
    ),
    "http_sessions_user_max": (
        "../plugins/console/tests/test_http_limits.py::test_no_user_keeps_out_the_others",
        "../plugins/console/tests/test_http_limits.py::test_a_share_in_use_is_not_ended",
    ),
    "http_session_idle_s": (
        "../plugins/console/tests/test_http_limits.py::test_sessions_of_browsers_end",
    ),
    "http_session_s": (
        "../plugins/console/tests/test_http_limits.py::test_sessions_of_browsers_end",
    ),
    "http_login_kept_s": (
        "../plugins/console/tests/test_http_limits.py::test_a_login_of_a_header_is_kept_for_a_while",
    ),
    "http_body_max": ("../plugins/console/tests/test_http_limits.py::test_bodies_are_bounded",),
    "http_body_s": (
        "../plugins/console/tests/test_http_limits.py::test_a_body_has_to_arrive_in_time",
    ),
    "http_head_max": ("../plugins/console/tests/test_http_limits.py::test_heads_are_bounded",),
    "http_idle_s": (
        "../plugins/console/tests/test_http_limits.py::test_connections_without_a_request_end",
    ),
    "http_streams_max": (
        "../plugins/console/tests/test_console_streams.py::test_streams_are_bounded",
    ),
    "http_streams_user_max": (
        "../plugins/console/tests/test_http_limits.py::test_no_user_takes_the_streams_of_others",
    ),
    "console_watched_nodes_max": (
        "../plugins/console/tests/test_console_parts.py::test_the_number_of_watched_nodes_is_bounded",
    ),
    "http_rows_max": ("../plugins/console/tests/test_http_limits.py::test_rows_are_bounded",),
    "management_rows_max": ("management/test_management.py::test_a_query_has_pages",),
    "management_nodes_max": ("management/test_management.py::test_management_nodes",),
    "trace_bytes_max": ("net/test_traces.py::test_a_trace_is_bounded",),
    "trace_total_bytes_max": ("net/test_traces.py::test_a_folder_of_traces_is_bounded",),
    "frame_watches_max": ("net/test_watching.py::test_the_number_of_watches_is_bounded",),
    "frame_watch_connections_max": (
        "net/test_watching.py::test_a_watch_follows_some_connections_and_keeps_the_latest_rungs",
    ),
    "frame_watch_rungs_max": (
        "net/test_watching.py::test_a_watch_follows_some_connections_and_keeps_the_latest_rungs",
    ),
    "token_size_max": ("container/test_cbs.py::test_what_is_wrong_with_a_request_is_said",),
    "tokens_max": ("container/test_cbs.py::test_too_many_tokens",),
    "token_deadline_s": ("container/test_cbs.py::test_the_first_token_has_to_come_in_time",),
    "jwks_size_max": ("security/test_jwts.py::test_the_size_of_a_key_set",),
    "token_message_size_max": ("container/test_cbs.py::test_a_request_for_a_token_is_small",),
    "attach_bytes_max": (
        f"{HERE}test_attach_bytes_max",
        f"{HERE}test_attach_bytes_max_counts_elements_without_octets",
    ),
    "delivery_tag_max": (f"{HERE}test_delivery_tag_max",),
    "output_max": (
        f"{HERE}test_output_max",
        "abuse/test_doors.py::test_who_does_not_read_costs_little_and_has_to_go",
    ),
    "handshake_s": (
        f"{HERE}test_handshake_s",
        "abuse/test_doors.py::test_the_deadline_is_absolute",
    ),
    "close_grace_s": (f"{HERE}test_close_grace_s",),
    "idle_timeout_s": (f"{HERE}test_idle_timeout_s",),
    "idle_timeout_min_s": (f"{HERE}test_idle_timeout_min_s",),
    "sasl_response_max": (f"{HERE}test_sasl_response_max",),
    "login_ahead_max": (f"{HERE}test_login_ahead_max",),
    "name_max": (f"{HERE}test_name_max",),
    # Enforced above the engines.
    "sections_max": ("test_message.py::test_there_are_at_most_sections_max_sections",),
    "proxy_header_max": ("net/test_proxy_headers.py::test_the_size_of_a_header_is_bounded",),
    "tls_handshake_s": ("net/test_tls.py::test_a_listener_does_not_wait_for_a_handshake",),
    "websocket_message_max": ("net/test_websocket.py::test_messages_are_bounded",),
    "websocket_stranger_max": (
        "net/test_websocket.py::test_frames_that_make_no_message_are_bounded",
        "net/test_websocket.py::test_a_stranger_costs_little_memory",
        "net/test_websocket.py::test_a_login_makes_room",
        "net/test_websocket.py::test_the_body_of_a_refusal_is_bounded",
    ),
    "websocket_overhead_max": (
        "net/test_websocket.py::test_frames_that_make_no_message_are_bounded",
    ),
    "websocket_linger_s": ("net/test_websocket.py::test_a_closed_websocket_leaves_no_task",),
    "connections_per_address_max": (
        "net/test_listeners.py::test_connections_of_one_address_are_bounded",
        "net/test_listeners.py::test_what_is_bounded_is_bounded_over_all_doors",
    ),
    "connections_per_user_max": (
        "container/test_namesakes.py::test_the_connections_of_a_user_are_bounded",
    ),
    "write_stall_s": ("net/test_driver.py::test_a_peer_that_does_not_read_is_dropped",),
    "connections_max": ("net/test_listeners.py::test_connections_are_bounded_at_the_number",),
    "connections_unauthenticated_max": (
        "net/test_listeners.py::test_strangers_are_bounded_and_make_room_by_logging_in",
        "abuse/test_doors.py::test_strangers_are_counted_at_all_doors_together",
    ),
    "connections_unauthenticated_per_address_max": (
        "net/test_listeners.py::test_strangers_of_one_address_are_bounded",
    ),
    "failed_login_delay_s": ("abuse/test_doors.py::test_a_failed_login_is_the_last",),
    "failed_login_delay_max_s": ("security/test_backoff.py::test_failures_cost_more_and_more",),
    "failed_login_memory_s": ("security/test_backoff.py::test_failures_are_forgotten",),
    "failed_logins_max": ("abuse/test_doors.py::test_who_fails_too_often_is_not_let_in",),
    "failed_logins_kept": ("security/test_backoff.py::test_what_is_remembered_is_bounded",),
    "scram_iterations_max": ("security/test_scram.py::test_the_work_that_a_server_asks_for",),
    "fan_legs_max": ("mesh/test_fans.py::test_fan_legs_max",),
    "splice_bytes_max": ("mesh/test_splices.py::test_splice_bytes_max",),
    "mesh_nodes_max": (
        "mesh/test_records.py::test_a_message_has_bounds",
        "mesh/test_database.py::test_mesh_nodes_max",
    ),
    "mesh_edges_max": ("mesh/test_routing.py::test_mesh_edges_max",),
    "mesh_receivers_max": ("mesh/test_mesh_limits.py::test_mesh_receivers_max",),
    "mesh_neighbours_max": (
        "mesh/test_records.py::test_a_message_has_bounds",
        "mesh/test_routing.py::test_a_node_has_so_many_neighbours",
    ),
    "mesh_node_addresses_max": (
        "mesh/test_records.py::test_a_message_has_bounds",
        "mesh/test_database.py::test_mesh_node_addresses_max",
    ),
    "mesh_part_max": ("mesh/test_records.py::test_a_message_has_bounds",),
    "mesh_name_max": ("mesh/test_records.py::test_a_message_has_bounds",),
    "mesh_urls_max": ("mesh/test_records.py::test_a_message_has_bounds",),
    "mesh_addresses_max": ("mesh/test_database.py::test_mesh_addresses_max",),
    "mesh_patterns_max": ("mesh/test_database.py::test_mesh_patterns_max",),
    "mesh_updates_max": ("mesh/test_database.py::test_mesh_updates_max",),
    "mesh_direct_max": ("mesh/test_mesh_direct.py::test_mesh_direct_max",),
    "mesh_channel_max": ("mesh/test_mesh_limits.py::test_mesh_channel_max",),
    "mesh_bridge_sessions_max": ("mesh/test_mesh_bridges.py::test_mesh_bridge_sessions_max",),
    "mesh_kept_s": ("mesh/test_database.py::test_mesh_kept_s",),
    "mesh_message_max": ("mesh/test_records.py::test_mesh_message_max",),
    "mesh_hops_max": ("mesh/test_paths.py::test_mesh_hops_max",),
    "mesh_legs_max": ("mesh/test_mesh_limits.py::test_mesh_legs_max",),
    "mesh_seeking_max": ("mesh/test_mesh_limits.py::test_mesh_seeking_max",),
    "mesh_records_waiting_max": ("mesh/test_mesh_limits.py::test_mesh_records_waiting_max",),
    "mesh_reply_links_max": ("mesh/test_mesh_limits.py::test_mesh_reply_links_max",),
    "mesh_tree_max": ("mesh/test_paths.py::test_mesh_tree_max",),
    "relay_targets_max": (
        "container/test_replies.py::test_the_relay_keeps_a_bounded_number_of_targets",
    ),
    "requests_running_max": (
        "container/test_replies.py::test_the_requests_of_a_connection_are_bounded",
    ),
    "broker_bytes_max": (
        "broker/test_producers.py::test_all_nodes_share_the_memory_of_the_broker",
    ),
    "queue_bytes_max": (f"{HERE}test_queue_bytes_max",),
    "queue_memory_bytes_max": (
        "broker/test_paging.py::test_only_the_head_is_in_memory_and_all_come_out_in_order",
    ),
    "queue_memory_messages_max": (
        "broker/test_paging.py::test_only_the_head_is_in_memory_and_all_come_out_in_order",
    ),
    "queue_stored_bytes_max": (
        "broker/test_paging.py::test_what_a_queue_has_in_the_store_is_bounded",
    ),
    "nodes_max": ("broker/test_broker.py::test_nodes_are_bounded",),
    "routing_key_max": ("broker/test_bindings.py::test_routing_has_bounds",),
    "routing_words_max": ("broker/test_bindings.py::test_routing_has_bounds",),
    "routing_keys_max": ("broker/test_bindings.py::test_routing_has_bounds",),
    "routing_looks_max": ("broker/test_bindings.py::test_routing_has_bounds",),
    "dead_letter_looks_max": (
        "broker/test_topology.py::test_a_dead_letter_is_held_against_so_many_bindings",
    ),
    "arguments_bytes_max": ("broker/test_topology.py::test_arguments_have_so_many_bytes",),
    "aliases_max": ("broker/test_nodes.py::test_a_node_has_so_many_aliases",),
    "dynamic_nodes_max": (
        "broker/test_nodes.py::test_dynamic_nodes_are_bounded_for_each_connection",
    ),
    "duplicates_max": ("broker/test_duplicates.py::test_only_so_many_are_remembered",),
    "backlog_max": (
        "broker/test_topics.py::test_a_subscriber_that_does_not_keep_up_is_detached_alone",
    ),
    "backlog_bytes_max": (
        "broker/test_topics.py::test_a_subscriber_that_does_not_keep_up_is_detached_alone",
    ),
    "termini_max": ("broker/test_termini.py::test_termini_are_bounded",),
    "termini_of_container_max": ("broker/test_termini.py::test_termini_are_bounded",),
    "terminus_timeout_max_s": ("broker/test_nodes.py::test_a_source_is_answered_as_it_is",),
    "target_outcomes_max": ("broker/test_termini.py::test_only_so_many_outcomes_are_remembered",),
    "unfinished_bytes_max": (
        "broker/test_termini.py::test_a_target_keeps_the_beginning_of_a_message",
    ),
    "transactions_max": (
        "broker/test_transactions.py::test_transactions_of_a_session_are_bounded",
    ),
    "stored_subscriptions_max": (
        "broker/test_turns.py::test_a_topic_has_so_many_durable_subscriptions",
    ),
    "connection_subscriptions_max": (
        "../plugins/amqp010/tests/test_amqp010_subscriptions.py::test_the_subscriptions_of_a_connection_are_bounded",
    ),
    "transaction_work_max": (
        "broker/test_transactions.py::test_the_work_of_a_transaction_is_bounded",
        "broker/test_transactions.py::test_what_is_acquired_is_bounded_too",
        "../plugins/amqp010/tests/test_amqp010_rollbacks.py::test_a_transaction_has_so_much_work_and_no_more",
    ),
    "transaction_s": (
        "broker/test_transactions.py::test_a_transaction_that_takes_too_long_is_rolled_back",
    ),
    "log_partitions_max": ("broker/test_logs.py::test_the_partitions_of_a_log_are_bounded",),
    "log_bytes_max": (
        "broker/test_logs.py::test_a_log_in_memory_is_bounded_unless_it_says_otherwise",
    ),
    "log_tail_bytes_max": (
        "broker/test_log_keeping.py::test_who_is_far_behind_is_served_from_the_store",
    ),
    "log_read_bytes_max": (
        "broker/test_log_keeping.py::test_who_is_far_behind_is_served_from_the_store",
    ),
    "log_cache_bytes_max": (
        "broker/test_log_keeping.py::test_who_is_far_behind_is_served_from_the_store",
    ),
    "log_eras_max": ("broker/test_log_keeping.py::test_each_start_of_the_broker_begins_an_era",),
    "log_groups_max": ("broker/test_logs.py::test_the_groups_of_a_log_are_bounded",),
    "log_holds_max": (
        "broker/test_logs.py::test_the_holds_on_a_log_are_bounded_in_number_and_time",
    ),
    "journal_timed_max": (
        "broker/test_lifecycles.py::test_as_many_messages_are_timed_as_may_be_and_no_more",
    ),
    "staged_bytes_max": ("broker/test_staging.py::test_there_is_a_bound_to_what_is_staged",),
    "stages_max": ("broker/test_staging.py::test_there_is_a_bound_to_what_is_staged",),
    "stage_s": ("broker/test_staging.py::test_stages_without_a_commit_are_forgotten",),
    "epoch_producer_s": ("broker/test_staging.py::test_a_producer_that_was_silent_makes_room",),
    "epoch_producers_max": ("broker/test_staging.py::test_there_is_a_bound_to_what_is_staged",),
    "epoch_writes_max": (
        "broker/test_staging.py::test_there_is_a_bound_to_what_is_said_of_epochs",
    ),
    "epoch_plan_max": ("broker/test_staging.py::test_there_is_a_bound_to_what_is_said_of_epochs",),
    "epoch_runs_max": ("broker/test_staging.py::test_there_is_a_bound_to_what_is_staged",),
    "leases_max": ("broker/test_leases.py::test_what_cannot_be_is_refused",),
    "lease_messages_max": ("broker/test_leases.py::test_what_cannot_be_is_refused",),
    "lease_ttl_max_s": ("broker/test_leases.py::test_what_cannot_be_is_refused",),
    "log_hold_max_s": (
        "broker/test_logs.py::test_the_holds_on_a_log_are_bounded_in_number_and_time",
    ),
    "dead_letter_history_max": (
        "broker/test_queues.py::test_a_message_that_was_given_up_often_tells_of_the_last_times",
    ),
    "dead_letter_hops_max": ("broker/test_dead_letter_cycles.py::test_a_chain_ends_at_the_bound",),
    "dead_letter_copies_max": (
        "../plugins/amqp091/tests/test_turns.py::test_the_copies_that_dead_letters_make_are_bounded",
    ),
    "retry_pause_s": (
        "broker/test_pauses.py::test_pauses_double_from_the_second_failure_up_to_a_maximum",
    ),
    "retry_pause_max_s": (
        "broker/test_pauses.py::test_pauses_double_from_the_second_failure_up_to_a_maximum",
    ),
    "retry_held_max_s": (
        "container/test_retrying.py::test_another_broker_gets_a_failed_message_back_after_a_bounded_pause",
    ),
    "decompressed_max": (
        "container/test_compression.py::test_decompressed_bodies_are_bounded_in_size",
    ),
    "decompressed_ratio_max": (
        "container/test_compression.py::test_decompressed_bodies_are_bounded_in_their_ratio",
    ),
    "log_lines_max": (
        "test_loglimit.py::test_a_period_has_so_many_lines_and_the_next_one_says_what_was_left_out",
    ),
    "log_period_s": (
        "test_loglimit.py::test_a_period_has_so_many_lines_and_the_next_one_says_what_was_left_out",
    ),
    "log_keys_max": ("test_loglimit.py::test_only_so_many_keys_are_remembered",),
    "annotations_max": ("broker/test_queues.py::test_annotations_cannot_grow_without_end",),
    "trace_context_within": (
        "container/test_callers.py::test_a_trace_is_found_near_the_start_of_a_message_only",
    ),
    "stuck_after_s": (
        "telemetry/test_stuck.py::test_a_container_without_a_broker_is_watched_on_request",
        "telemetry/test_stuck.py::test_zero_turns_the_watch_off",
    ),
    "schedule_every_min_s": ("broker/test_schedules.py::test_the_shortest_interval_is_limited",),
    "schedule_catch_up_max": ("broker/test_schedules.py::test_the_limit_of_missed_times",),
    "metrics_nodes_max": (
        "telemetry/test_metrics.py::test_many_nodes_with_hostile_names_are_bounded_and_escaped",
    ),
    "filters_max": ("broker/test_filters.py::test_the_filters_of_a_source_are_bounded",),
    "filter_entries_max": (
        "broker/test_filters.py::test_the_entries_of_property_filters_are_bounded",
    ),
    "filter_text_max": (
        "broker/test_selectors.py::test_the_bytes_of_a_selector_are_bounded",
        "broker/test_filters.py::test_the_text_of_a_binding_and_its_subject_are_bounded",
    ),
    "selector_terms_max": ("broker/test_selectors.py::test_the_terms_of_a_selector_are_bounded",),
    "selector_depth_max": ("broker/test_selectors.py::test_the_depth_of_a_selector_is_bounded",),
    "like_wildcards_max": (
        "broker/test_selectors.py::test_the_wildcards_of_a_selector_are_bounded",
    ),
    "filter_subject_max": (
        "broker/test_selectors.py::test_the_subject_of_a_pattern_is_bounded",
        "broker/test_filters.py::test_the_text_of_a_binding_and_its_subject_are_bounded",
    ),
    "filter_steps_max": (
        "broker/test_selectors.py::test_the_steps_of_an_evaluation_are_bounded",
        "broker/test_filters.py::test_a_message_that_takes_too_many_steps_does_not_match",
    ),
}


@pytest.mark.parametrize("limit", Limits.__struct_fields__)
def test_every_limit_has_a_test(limit: str) -> None:
    nodes = PROVED_BY.get(limit, ())
    assert nodes, f"nothing reaches {limit}: write a test, and name it in PROVED_BY"
    for node in nodes:
        file, _, name = node.partition("::")
        tests = names_of_tests(file)
        assert not name or name in tests, f"there is no test {node}"


def test_the_table_names_no_limit_that_is_gone() -> None:
    assert set(PROVED_BY) <= set(Limits.__struct_fields__)


@cache
def names_of_tests(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent.parent / file).read_text("utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


# --- help --------------------------------------------------------------------------------------


def attach(name: str = "l", handle: int = 0, *, sender: bool = True, **fields: Any) -> bytes:
    role = {"source": Source(), "target": Target(address="q")}
    if sender:
        role["initial_delivery_count"] = 0  # type: ignore[assignment]
    return frame(Attach(name=name, handle=handle, role=not sender, **(role | fields)))  # type: ignore[arg-type]


def receiving(engine: Engine, *, credit: int = 10_000, **options: Any) -> tuple[Any, Recorder]:
    """Return our end of a link on which the peer sends, with *credit*."""
    (event,) = engine.receive(attach(), 0.0)
    endpoint = Recorder()
    event.link.accept(endpoint, **options)  # type: ignore[union-attr]
    event.link.grant(credit)  # type: ignore[union-attr]
    engine.take()
    return event.link, endpoint  # type: ignore[union-attr]


def sized(size: int, **fields: Any) -> bytes:
    """Return an open of *size* octets."""
    opening = Open(container_id="c", properties={"pad": "x" * 300}, **fields)
    opening.properties = {"pad": "x" * (size - len(frame(opening)) + 300)}
    octets = frame(opening)
    assert len(octets) == size
    return octets


# --- frames --------------------------------------------------------------------------------------


@pytest.mark.req("X3", "SE18")
@pytest.mark.parametrize("bound", [512, 1_000, 8 * KIB])
def test_frame_size_before_open(bound: int) -> None:
    limits = Limits(frame_size_before_open=bound)
    engine = server(limits=limits)
    assert isinstance(engine.receive(AMQP_HEADER + sized(bound), 0.0)[0], Opened)
    engine = server(limits=limits)
    # Refused on the header alone, before the body is kept.
    header = struct.pack(">IBBH", bound + 1, 2, 0, 0)
    assert isinstance(engine.receive(AMQP_HEADER + header, 0.0)[0], ConnectionFailed)
    assert closed_with(engine) == "amqp:connection:framing-error"
    engine = server(limits=limits, mechanisms=("PLAIN",), sasl_required=True)
    header = struct.pack(">IBBH", bound + 1, 2, 1, 0)
    assert isinstance(engine.receive(SASL_HEADER + header, 0.0)[0], ConnectionFailed)
    assert engine.finished


@pytest.mark.req("X3", "X4")
@pytest.mark.parametrize("bound", [512, 1_000, 64 * KIB])
def test_frame_size_max(bound: int) -> None:
    engine = begun(limits=Limits(frame_size_max=bound))
    link, endpoint = receiving(engine)
    octets = transfer(0, b"")
    engine.receive(transfer(0, b"x" * (bound - len(octets))), 0.0)
    assert len(endpoint.deliveries) == 1
    assert link.attached
    engine.receive(struct.pack(">IBBH", bound + 1, 2, 0, 0), 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"
    # Our own limit is advertised, not the peer's.
    engine = server(limits=Limits(frame_size_max=bound))
    engine.receive(AMQP_HEADER + frame(Open(container_id="p", max_frame_size=0xFFFFFFFF)), 0.0)
    ours = next(f[1] for f in said(engine) if isinstance(f, tuple))
    assert ours.max_frame_size == bound
    assert engine.frame_size_out == bound


@pytest.mark.req("T9", "X26")
def test_nesting_max() -> None:
    def nested(depth: int) -> bytes:
        value: object = 1
        for _ in range(depth):
            value = [value]
        return frame(Open(container_id="c", properties={"p": value}))

    def survives(depth: int, bound: int) -> bool:
        engine = server(limits=Limits(nesting_max=bound))
        (event,) = engine.receive(AMQP_HEADER + nested(depth), 0.0)
        if isinstance(event, ConnectionFailed):
            assert closed_with(engine) == "amqp:decode-error"
        return isinstance(event, Opened)

    for bound in (6, 32):
        deepest = max(depth for depth in range(1, bound + 1) if survives(depth, bound))
        assert not survives(deepest + 1, bound)
        # The open itself, its map and described values count too.
        assert bound - 4 <= deepest < bound


@pytest.mark.req("T9", "X26")
@pytest.mark.parametrize("bound", [100, 2_000])
def test_elements_max(bound: int) -> None:
    def survives(count: int) -> bool:
        # Elements of no width: the octets do not bound them.
        engine = server(limits=Limits(elements_max=bound))
        pairs = b"\xa3\x01p" + b"\xf0" + struct.pack(">II", 5, count) + b"\x41"
        properties = b"\xd1" + struct.pack(">II", 4 + len(pairs), 2) + pairs
        fields = b"\xa1\x01c" + b"\x40" * 8 + properties
        body = b"\x00\x53\x10\xd0" + struct.pack(">II", 4 + len(fields), 10) + fields
        octets = struct.pack(">IBBH", len(body) + 8, 2, 0, 0) + body
        (event,) = engine.receive(AMQP_HEADER + octets, 0.0)
        if isinstance(event, ConnectionFailed):
            assert closed_with(engine) == "amqp:decode-error"
        return isinstance(event, Opened)

    most = max(count for count in range(bound - 50, bound + 1) if survives(count))
    assert not survives(most + 1)
    assert bound - 20 <= most <= bound
    assert not survives(0xFFFFFFFF)


# --- handshakes and time -------------------------------------------------------------------------


@pytest.mark.req("X7", "SE18")
@pytest.mark.parametrize("sent", ["", "header", "sasl", "init"])
def test_handshake_s(sent: str) -> None:
    def waiting() -> Engine:
        sasl = sent in ("sasl", "init")
        engine = server(limits=Limits(handshake_s=7), mechanisms=("PLAIN",), sasl_required=sasl)
        if sent == "header":
            engine.receive(AMQP_HEADER, 6.0)
        elif sent == "sasl":
            engine.receive(SASL_HEADER, 6.0)
        elif sent == "init":
            engine.receive(SASL_HEADER + frame(SaslInit("PLAIN", b"x"), kind=1), 6.0)
        engine.take()
        return engine

    engine = waiting()
    assert engine.deadline == 7
    assert engine.tick(6.999) == []
    assert not engine.finished
    # Received octets do not extend the deadline.
    (event,) = engine.tick(7.0)
    assert isinstance(event, ConnectionFailed)
    assert event.error.condition == "amqp:connection:forced"
    assert engine.finished


@pytest.mark.req("X26")
def test_close_grace_s() -> None:
    engine = begun(limits=Limits(close_grace_s=3))
    engine.close()
    # The grace period begins at the next tick, whenever the peer last sent something.
    assert engine.tick(10.0) == []
    assert engine.deadline == 13
    assert engine.tick(12.999) == []
    assert not engine.finished
    assert [type(event) for event in engine.tick(13)] == [Closed]
    assert engine.finished


@pytest.mark.req("X6")
@pytest.mark.parametrize("seconds", [0.5, 60])
def test_idle_timeout_s(seconds: float) -> None:
    engine = server(limits=Limits(idle_timeout_s=seconds))
    engine.receive(AMQP_HEADER + OPEN, 5.0)
    ours = next(f[1] for f in said(engine) if isinstance(f, tuple))
    # Half of the actual timeout is advertised (§2.4.5).
    assert ours.idle_time_out == seconds * 1_000
    limit = 5 + 2 * seconds
    assert engine.deadline == limit
    assert engine.tick(limit - 0.001) == []
    (event,) = engine.tick(limit)
    assert isinstance(event, ConnectionFailed)
    assert closed_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.req("X6")
def test_idle_timeout_min_s() -> None:
    limits = Limits(idle_timeout_min_s=2)
    engine = server(limits=limits)
    (event,) = engine.receive(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=2_000)), 0.0)
    assert isinstance(event, Opened)
    engine = server(limits=limits)
    (event,) = engine.receive(AMQP_HEADER + frame(Open(container_id="p", idle_time_out=1_999)), 0.0)
    assert isinstance(event, ConnectionFailed)
    assert closed_with(engine) == "amqp:not-allowed"


@pytest.mark.req("SE1", "SE18")
@pytest.mark.parametrize("bound", [10, 4 * KIB])
def test_sasl_response_max(bound: int) -> None:
    limits = Limits(sasl_response_max=bound)
    engine = server(limits=limits, mechanisms=("PLAIN",), sasl_required=True)
    init = frame(SaslInit("PLAIN", b"x" * bound), kind=1)
    (event,) = engine.receive(SASL_HEADER + init, 0.0)
    assert isinstance(event, LoginRequested)
    assert len(event.response or b"") == bound
    engine = server(limits=limits, mechanisms=("PLAIN",), sasl_required=True)
    init = frame(SaslInit("PLAIN", b"x" * (bound + 1)), kind=1)
    (event,) = engine.receive(SASL_HEADER + init, 0.0)
    assert isinstance(event, LoginRequested)
    assert (event.response, event.exchange.refused[:10]) == (None, "a response")
    assert engine.receive(b"", 0.0) == []
    event.exchange.succeed("somebody")
    outcome = [f[1] for f in said(engine) if isinstance(f, tuple)][-1]
    # The same error text as for a wrong password.
    assert (type(outcome), outcome.code) == (SaslOutcome, 1)


@pytest.mark.req("SE1", "SE18")
@pytest.mark.parametrize("size", [1, 1_000, 0])
def test_login_ahead_max(size: int) -> None:
    bound = 5_000
    engine = server(limits=Limits(login_ahead_max=bound), mechanisms=("PLAIN",), sasl_required=True)
    (event,) = engine.receive(SASL_HEADER + frame(SaslInit("PLAIN", b"x"), kind=1), 0.0)
    step = size or bound
    for _ in range(bound // step):
        assert engine.receive(b"A" * step, 0.0) == []
    assert not engine.finished
    (failed,) = engine.receive(b"A", 0.0)
    assert isinstance(failed, ConnectionFailed)
    assert failed.error.condition == "amqp:resource-limit-exceeded"
    assert engine.finished
    assert event.exchange.succeed("u") == []  # type: ignore[union-attr]


@pytest.mark.req("X4", "X12", "X26")
def test_name_max() -> None:
    limits = Limits(name_max=20)
    engine = server(limits=limits)
    (event,) = engine.receive(AMQP_HEADER + frame(Open(container_id="c" * 20)), 0.0)
    assert isinstance(event, Opened)
    engine = server(limits=limits)
    (event,) = engine.receive(AMQP_HEADER + frame(Open(container_id="c" * 21)), 0.0)
    assert closed_with(engine) == "amqp:invalid-field"
    engine = begun(limits=limits)
    # Counted in characters, not octets.
    assert len(engine.receive(attach("\U0001f600" * 20), 0.0)) == 1
    assert engine.receive(attach("n" * 21, 1), 0.0) == []
    assert ended_with(engine) == "amqp:invalid-field"


# --- sessions and links ----------------------------------------------------------------------------


@pytest.mark.req("X8")
@pytest.mark.parametrize("bound", [0, 3, 63])
def test_channel_max(bound: int) -> None:
    engine = opened(limits=Limits(channel_max=bound))
    begin = Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1)
    for channel in range(bound + 1):
        engine.receive(frame(begin, channel), 0.0)
    assert kinds(engine) == ["Begin"] * (bound + 1)
    check(engine)
    engine.receive(frame(begin, bound + 1), 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X8", "X9")
def test_sessions_of_both_sides() -> None:
    engine = opened(limits=Limits(channel_max=3))
    for _ in range(2):
        engine.begin()
    begin = Begin(next_outgoing_id=0, incoming_window=1, outgoing_window=1)
    for channel in range(2):
        engine.receive(frame(begin, channel), 0.0)
    assert kinds(engine) == ["Begin"] * 4
    # Each session has a channel in each direction, on either side's initiative.
    engine.receive(frame(begin, 2), 0.0)
    assert closed_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.req("X8")
@pytest.mark.parametrize("bound", [0, 3, 255])
def test_handle_max(bound: int) -> None:
    engine = begun(limits=Limits(handle_max=bound))
    for handle in range(bound + 1):
        (event,) = engine.receive(attach(f"l{handle}", handle), 0.0)
        event.link.accept(Recorder())  # type: ignore[union-attr]
    check(engine)
    engine.take()
    engine.receive(attach("one more", bound + 1), 0.0)
    assert closed_with(engine) == "amqp:connection:framing-error"


@pytest.mark.req("X8")
def test_links_without_an_answer() -> None:
    engine = begun(limits=Limits(handle_max=3))
    for number in range(4):
        assert len(engine.receive(attach(f"l{number}", number) + frame(Detach(number)), 0.0)) == 1
    engine.take()
    assert engine.receive(attach("one more", 0), 0.0) == []
    assert ended_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.req("X10", "X11")
@pytest.mark.parametrize("bound", [1, 7, 300])
def test_session_window(bound: int) -> None:
    engine = opened(limits=Limits(session_window=bound))
    engine.receive(BEGIN, 0.0)
    (begin,) = [f[1] for f in said(engine) if isinstance(f, tuple)]
    assert begin.incoming_window == bound
    _, endpoint = receiving(engine)
    engine.receive(b"".join(transfer(n) for n in range(bound)), 0.0)
    assert len(endpoint.deliveries) == bound
    engine.receive(transfer(bound), 0.0)
    assert ended_with(engine) == "amqp:session:window-violation"


@pytest.mark.req("X18", "SE18")
def test_session_window_bytes_of_unfinished_messages() -> None:
    bound = 100_000
    engine = begun(limits=Limits(session_window_bytes=bound, frame_size_max=2_000))
    link, _ = receiving(engine)
    # Each piece counts with its bytes and 64 more.
    pieces = bound // 1_000
    engine.sessions[0].incoming_window = 1_000
    engine.receive(transfer(0, b"x" * 936, more=True), 0.0)
    for _ in range(pieces - 1):
        engine.receive(transfer(None, b"x" * 936, more=True), 0.0)
    assert engine.assembling == bound
    assert link.attached
    engine.take()
    engine.receive(transfer(None, b"x", more=True), 0.0)
    assert detached_with(engine) == "amqp:resource-limit-exceeded"
    assert engine.assembling == 0
    check(engine)


@pytest.mark.req("X11", "X19")
def test_session_window_bytes_of_unread_streams() -> None:
    limits = Limits(session_window_bytes=40 * KIB, frame_size_max=KIB, session_window=1_000)
    receiver = Recorder(credit=1)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(receiver, streaming=True))
    joined.pump()
    session = joined.client.begin()
    link = session.attach_sender("l", Recorder(), target=Target(address="q"))
    joined.pump()
    body = link.send(b"", more=True)
    for _ in range(200):
        body.write(b"x" * 896)
    joined.pump()
    # The window closes when a further frame might not fit, so that no frame is refused.
    assert 30 * KIB < joined.server.held <= 40 * KIB
    assert link.attached
    (delivery,) = receiver.deliveries
    while delivery.size < 200 * 896:
        delivery.read_chunks()
        joined.pump()
    check(joined.server)


@pytest.mark.req("X10", "SE18")
def test_unsettled_max_of_what_comes() -> None:
    engine = begun(limits=Limits(unsettled_max=10, session_window=4))
    _, endpoint = receiving(engine)
    session = engine.sessions[0]
    number = 0
    while session.incoming_window:
        engine.receive(transfer(number), 0.0)
        engine.take()
        number += 1
    # At the bound the window is not opened again; frames in the granted window may still arrive.
    assert 10 <= len(session.incoming) < 10 + 4
    engine.receive(transfer(number), 0.0)
    assert ended_with(engine) == "amqp:session:window-violation"
    assert len(endpoint.deliveries) == number


@pytest.mark.req("X24", "X28", "SE18")
@pytest.mark.parametrize("above", [0, 1])
def test_unsettled_max_of_a_map(above: int) -> None:
    """The bound holds for the peer's unsettled map, and for the one that we send (Part 2 §2.7.3)."""
    engine = begun(limits=Limits(unsettled_max=10))
    theirs = {bytes([n]): None for n in range(10 + above)}
    attach = Attach(
        name="l", handle=0, role=True, source=Source(), target=Target(), unsettled=theirs
    )
    events = engine.receive(frame(attach), 0.0)
    if above:
        assert events == []
        assert detached_with(engine) == "amqp:resource-limit-exceeded"
        return
    (event,) = events
    ours = {bytes([n]): Unsettled(tag=bytes([n]), payload=b"x") for n in range(11)}
    event.link.accept(Recorder(), unsettled=ours)  # type: ignore[union-attr]
    (_, answer) = said(engine)[0]  # type: ignore[misc]
    assert isinstance(answer, Attach)
    assert list(answer.unsettled or ()) == list(ours)[:10]
    assert answer.incomplete_unsettled


@pytest.mark.req("M25", "X28", "SE18")
@pytest.mark.parametrize("above", [0, 1])
def test_resume_sections_max(above: int) -> None:
    """A delivery of too many sections is resumed from its beginning (Part 3 §3.4.1)."""
    engine = begun(limits=Limits(resume_sections_max=10))
    attach = Attach(
        name="l",
        handle=0,
        role=False,
        source=Source(),
        target=Target(),
        unsettled={b"a": None},
        initial_delivery_count=0,
    )
    (event,) = engine.receive(frame(attach), 0.0)
    payload = b"\x00\x53\x75\xa0\x01x" * (10 + above)
    endpoint = Recorder()
    event.link.accept(  # type: ignore[union-attr]
        endpoint, unsettled={b"a": Unsettled(tag=b"a", payload=payload, complete=False)}
    )
    assert event.link.sent_unsettled == {b"a": None if above else Received(10, 0)}  # type: ignore[union-attr]
    engine.receive(transfer(0, payload + b"\x00\x53\x75\xa0\x01y", tag=b"a", resume=True), 0.0)
    assert endpoint.deliveries[0].payload == payload + b"\x00\x53\x75\xa0\x01y"


@pytest.mark.req("X28", "SE18")
def test_unsettled_max_of_what_goes() -> None:
    engine = begun(limits=Limits(unsettled_max=10))
    flow = Flow(
        next_incoming_id=0,
        incoming_window=1_000,
        next_outgoing_id=0,
        outgoing_window=9,
        handle=0,
        delivery_count=0,
        link_credit=1_000,
    )
    (event,) = engine.receive(attach(sender=False) + frame(flow), 0.0)
    endpoint = Recorder()
    link = event.link  # type: ignore[union-attr]
    link.accept(endpoint)
    sent = 0
    while link.writable:
        link.send(b"x")
        sent += 1
    assert sent == 10
    endpoint.credits.clear()
    engine.receive(frame(Disposition(True, 0, 2, True, ACCEPTED)), 0.0)
    assert endpoint.credits == [990]
    assert link.writable


@pytest.mark.req("X26")
@pytest.mark.parametrize("bound", [0, 4, 32])
def test_delivery_tag_max(bound: int) -> None:
    engine = begun(limits=Limits(delivery_tag_max=bound))
    link, endpoint = receiving(engine)
    engine.receive(transfer(0, tag=b"t" * bound), 0.0)
    assert len(endpoint.deliveries) == 1
    assert link.attached
    engine.receive(transfer(1, tag=b"t" * (bound + 1)), 0.0)
    assert detached_with(engine) == "amqp:invalid-field"


def fat(number: int, size: int) -> bytes:
    """Return an attach that counts *size* octets beyond the free ones."""
    engine = begun()
    engine.receive(attach(f"l{number:04}", number, properties={"p": "x" * size}), 0.0)
    pad = size + (size - engine.kept)
    return attach(f"l{number:04}", number, properties={"p": "x" * pad})


@pytest.mark.req("X26")
def test_attach_bytes_max() -> None:
    one = fat(0, 10_000)
    engine = begun(limits=Limits(attach_bytes_max=30_000))
    for number in range(3):
        (event,) = engine.receive(fat(number, 10_000), 0.0)
        event.link.accept(Recorder())  # type: ignore[union-attr]
    assert engine.kept == 30_000
    engine.take()
    # Another octet is too many; attaches of the usual size do not count.
    assert engine.receive(fat(3, 10_000), 0.0) == []
    assert detached_with(engine) == "amqp:resource-limit-exceeded"
    (event,) = engine.receive(attach("small", 9), 0.0)
    event.link.accept(Recorder())  # type: ignore[union-attr]
    engine.take()
    assert engine.kept == 30_000
    # The end of a link makes room, as does a detach before the link was accepted.
    engine.receive(frame(Detach(0, True, None)), 0.0)
    assert engine.kept == 20_000
    (event,) = engine.receive(one, 0.0)
    assert engine.kept == 30_000
    engine.receive(frame(Detach(0, True, None)), 0.0)
    event.link.refuse(Error("amqp:not-found"))  # type: ignore[union-attr]
    assert engine.kept == 20_000
    # The end of a session makes room as well, and that of the connection releases everything.
    engine.receive(frame(End()), 0.0)
    assert engine.kept == 0


def test_attach_bytes_max_counts_elements_without_octets() -> None:
    nulls = Raw(b"\xf0" + struct.pack(">II", 5, 20_000) + b"\x40")
    said_first = composite(
        "attach",
        name="l",
        handle=0,
        role=False,
        source=composite("source"),
        target=composite("target", address="q"),
        initial_delivery_count=0,
        properties=Raw(bytes(encode("map", {"p": nulls}))),
    )
    octets = encode_frame(said_first)
    assert len(octets) < 200
    engine = begun(limits=Limits(attach_bytes_max=100_000))
    assert engine.receive(octets, 0.0) == []
    assert detached_with(engine) == "amqp:resource-limit-exceeded"


def test_attach_bytes_max_counts_begins() -> None:
    engine = opened(limits=Limits(attach_bytes_max=10_000))
    for channel in range(2):
        properties = {"p": "x" * 6_000}
        engine.receive(
            frame(
                Begin(
                    next_outgoing_id=0,
                    incoming_window=9,
                    outgoing_window=9,
                    properties=properties,
                ),
                channel,
            ),
            0.0,
        )
    assert closed_with(engine) == "amqp:resource-limit-exceeded"


@pytest.mark.parametrize(
    ("properties", "kept"),
    [
        ({"p": "x" * 5_000}, {}),
        ({"txn-id": b"t", "p": "x" * 5_000}, {"txn-id": b"t"}),
        ({"x-opt-load": [3, 4]}, {"x-opt-load": [3, 4]}),
        ({"x-opt-load": [3, 4, "x" * 5_000]}, {}),
        ({"x-opt-load": ["x" * 5_000, 4]}, {}),
        ({"x-opt-load": [2**32, 4]}, {}),
        ({"x-opt-load": "x" * 5_000}, {}),
    ],
)
def test_a_flow_leaves_nothing_but_its_transaction_and_load(
    properties: dict[str, Any], kept: dict[str, Any]
) -> None:
    engine = begun()
    (event,) = engine.receive(attach(sender=False), 0.0)
    link: Any = event.link  # type: ignore[union-attr]
    link.accept(Recorder())
    engine.receive(
        frame(
            Flow(
                next_incoming_id=0,
                incoming_window=9,
                next_outgoing_id=0,
                outgoing_window=9,
                handle=0,
                delivery_count=0,
                link_credit=1,
                properties=properties,
            )
        ),
        0.0,
    )
    assert link.flow_properties == kept


# --- messages ----------------------------------------------------------------------------------------


@pytest.mark.req("X22")
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("streaming", [False, True])
def test_message_size_max(streaming: bool, pieces: int) -> None:
    bound = 900
    limits = Limits(message_size_max=bound, streaming_message_size_max=bound)

    def sent(size: int) -> tuple[Engine, Any]:
        engine = begun(limits=limits)
        link, _ = receiving(engine, streaming=streaming)
        for number in range(pieces):
            last = number == pieces - 1
            body = b"x" * (size - (pieces - 1) * 300 if last else 300)
            engine.receive(transfer(None if number else 0, body, more=not last), 0.0)
        return engine, link

    engine, link = sent(bound)
    assert link.attached
    assert link.delivery_count == 1
    engine, link = sent(bound + 1)
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    assert not link.attached
    # The limit is declared, so that no honest peer exceeds it.
    engine = begun(limits=limits)
    (event,) = engine.receive(attach(), 0.0)
    event.link.accept(Recorder())  # type: ignore[union-attr]
    (answer,) = [f[1] for f in said(engine) if isinstance(f, tuple)]
    assert answer.max_message_size == bound


@pytest.mark.req("X19", "X22")
def test_streaming_message_size_max() -> None:
    limits = Limits(message_size_max=10, streaming_message_size_max=1_000)
    engine = begun(limits=limits)
    link, endpoint = receiving(engine, streaming=True)
    engine.receive(transfer(0, b"x" * 500, more=True) + transfer(None, b"x" * 500), 0.0)
    assert endpoint.deliveries[0].complete
    assert link.attached
    engine.receive(transfer(1, b"x" * 1_001, more=True), 0.0)
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    # By default streams are unlimited: a stream is never in memory as a whole.
    assert DEFAULT_LIMITS.streaming_message_size_max == 0


@pytest.mark.req("X28", "SE18")
def test_output_max() -> None:
    bound = 10_000
    limits = Limits(output_max=bound, frame_size_max=1_000, session_window=100_000)
    joined = Joined(limits=limits, on_attach=lambda link: link.accept(Recorder(credit=1_000)))
    joined.pump()
    link = joined.client.begin().attach_sender("l", Recorder(), target=Target(address="q"))
    joined.pump()
    while link.writable:
        link.send(b"x" * 500)
    assert bound <= joined.client.output_size < bound + 1_000
    before = joined.client.output_size
    # A message sent nevertheless waits in the link, and does not grow the output buffer.
    link.send(b"y" * 100_000)
    assert joined.client.output_size == before
    assert sum(map(len, joined.client.take())) < bound + 1_000


@pytest.mark.req("B17")
def test_queue_bytes_max() -> None:
    bound = 50_000
    world = World(Queue("q"), limits=Limits(queue_bytes_max=bound))
    sender = world.client().sender("q")
    while sender.link.credit:
        sender.send(b"x" * 990)
    held = world.stats("q").bytes
    assert bound - 5_000 <= held <= bound
    world.client().receiver("q", credit=1_000).settle(ACCEPTED)
    assert sender.link.credit > 0


# --- shared resources ------------------------------------------------------------------------------


@pytest.mark.req("SE18")
@given(st.data())
@settings(max_examples=30)
def test_the_client_is_held_to_the_same_bounds(data: st.DataObject) -> None:
    """A hostile server meets the same bounds as a hostile client: the same code checks both."""
    limits = Limits(
        frame_size_max=data.draw(st.integers(512, 2_000)),
        handle_max=data.draw(st.integers(0, 5)),
        message_size_max=data.draw(st.integers(1, 2_000)),
        session_window=data.draw(st.integers(1, 20)),
    )
    answers: list[list[object]] = []
    octets = (
        attach("l", 0)
        + data.draw(st.sampled_from([attach("m", limits.handle_max + 1), b""]))
        + transfer(0, b"x" * data.draw(st.integers(0, limits.frame_size_max - 100)), more=True)
        + b"".join(
            transfer(None, b"y" * 300, more=True) for _ in range(data.draw(st.integers(0, 30)))
        )
    )
    for serves in (True, False):
        if serves:
            engine = server(limits=limits)
            engine.receive(AMQP_HEADER + OPEN + BEGIN, 0.0)
        else:
            engine = amqp10.client(amqp10.ClientOptions(container_id="server", limits=limits), 0.0)
            engine.receive(AMQP_HEADER + OPEN + BEGIN, 0.0)
        engine.take()
        for at in range(0, len(octets), 100):
            for event in engine.receive(octets[at : at + 100], 0.0):
                if hasattr(event, "link"):
                    event.link.accept(Recorder(credit=5))
        answers.append(said(engine))
        check(engine)
    assert answers[0] == answers[1]


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Operators plan with the defaults: changing one concerns users, and needs a note."""
    assert DEFAULT_LIMITS.frame_size_before_open == 8 * KIB
    assert DEFAULT_LIMITS.frame_size_max == 64 * KIB
    assert DEFAULT_LIMITS.message_size_max == 16 * MIB
    assert DEFAULT_LIMITS.session_window_bytes == 64 * MIB
    assert (DEFAULT_LIMITS.channel_max, DEFAULT_LIMITS.handle_max) == (63, 255)
    assert (DEFAULT_LIMITS.nesting_max, DEFAULT_LIMITS.elements_max) == (32, 65_536)
    assert DEFAULT_LIMITS.unsettled_max == 5_000
    assert DEFAULT_LIMITS.output_max == MIB
    assert (DEFAULT_LIMITS.handshake_s, DEFAULT_LIMITS.tls_handshake_s) == (10, 5)
    assert DEFAULT_LIMITS.write_stall_s == 30
    assert DEFAULT_LIMITS.connections_max == 10_000
    assert DEFAULT_LIMITS.connections_per_address_max == 5_000
    assert DEFAULT_LIMITS.connections_per_user_max == 1_000
    assert DEFAULT_LIMITS.connections_unauthenticated_max == 1_000
    assert DEFAULT_LIMITS.connections_unauthenticated_per_address_max == 100
    assert DEFAULT_LIMITS.websocket_message_max == MIB
    assert DEFAULT_LIMITS.websocket_stranger_max == 64 * KIB
