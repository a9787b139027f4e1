"""Limits on everything that a peer can make grow, each with its reason.

One frozen :class:`Limits` is passed from the listener or dialler to the engine. No value from the
wire bounds a loop or an allocation; these limits do. Each is tested at the limit and one above.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import fields

KIB = 1024
MIB = 1024 * KIB

#: Longest time that a setting accepts, in seconds: three hundred years. Unlike infinity it can be
#: added to a time of day and counted in milliseconds.
SECONDS_MAX: Final = 1e10


def check_seconds(
    name: str, value: float, *, least: float = 0.0, most: float = SECONDS_MAX
) -> None:
    """Refuse a time outside *least* to *most*.

    NaN is refused too: no comparison with it is true, so a deadline computed from it would never
    come or come at once, depending on how the comparison is written.

    Raises:
        ValueError: The value is refused; the text has the name, the bounds and the value.
    """
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least:g} to {most:g} seconds, got {value}")


#: Least and greatest values of fields that the protocol bounds, or that would block all work.
_RANGES: Final = {
    # Part 2 §2.3.1 requires 512; tests may want less, but a frame has at least eight octets.
    "frame_size_before_open": (8, 2**32 - 1),
    "frame_size_max": (512, 2**32 - 1),
    "channel_max": (0, 2**16 - 1),
    "mesh_channel_max": (0, 2**16 - 1),
    "handle_max": (0, 2**32 - 1),
    "session_window": (1, 2**31 - 1),
    "delivery_tag_max": (0, 32),
    "idle_timeout_s": (0.0, (2**32 - 1) / 1000),
    # A full message must hold at least one record, and a rate of 0 would never send one.
    "mesh_message_max": (4 * KIB, 2**32 - 1),
    "mesh_part_max": (1, 10_000),
    "mesh_name_max": (1, 1_024),
    "mesh_updates_max": (1, 1_000_000),
    # Records wait for the first credit in any case, and a reply for the link that was opened for it.
    "mesh_records_waiting_max": (64, 2**31 - 1),
    "mesh_reply_links_max": (1, 2**31 - 1),
}
#: Greatest value of the other fields: that of a signed 64-bit integer.
_COUNT_MAX: Final = 2**63 - 1


class Limits(Struct, frozen=True, gc=False):
    """Limits of one connection, unless a field states another scope."""

    #: Largest frame accepted before open (bytes). Part 2 §2.3.1 requires 512; tokens and open
    #: properties need more in practice.
    frame_size_before_open: int = 8 * KIB
    #: ``max-frame-size`` that we advertise, independent of the peer's (bytes).
    frame_size_max: int = 64 * KIB
    #: ``max-message-size`` of links whose messages are assembled in memory (bytes). Larger durable
    #: messages for a queue in a store are written there in pieces.
    message_size_max: int = 16 * MIB
    #: Octets to which a compressed body may grow when it is decoded, and how many times its own size. Bodies up
    #: to 1 MiB may have any ratio, since rows that repeat are compressed that well.
    decompressed_max: int = 64 * MIB
    decompressed_ratio_max: int = 100
    #: ``max-message-size`` advertised by links that stream; 0 means no limit.
    streaming_message_size_max: int = 0
    #: Highest channel number: 64 sessions. Each session costs tables and windows.
    channel_max: int = 63
    #: Highest handle: 256 links per session.
    handle_max: int = 255
    #: Depth of nested lists, maps, arrays and described values together.
    nesting_max: int = 32
    #: Elements decoded per frame body or message section, zero-width ones included.
    elements_max: int = 65_536
    #: Sections in one message; data and sequence sections may repeat.
    sections_max: int = 10_000
    #: Incoming window: transfer frames that the peer may send ahead, per session.
    session_window: int = 2_048
    #: Bytes of complete and partial deliveries that a session may hold before its
    #: incoming window is no longer extended.
    session_window_bytes: int = 64 * MIB
    #: Unsettled deliveries in one session, in either direction.
    unsettled_max: int = 5_000
    #: Sections counted to compute the position of a delivery when its link is resumed. A delivery with
    #: more is resumed from its beginning, so that a peer which resumes repeatedly cannot cost much time.
    resume_sections_max: int = 100
    #: Deliveries that a peer may begin on a link before it has credit there. AMQP 1.0 has no such
    #: deliveries, older drafts do. Until the attach is answered, all of them together may have at most
    #: ``message_size_max`` bytes. Deliveries in a transaction need credit in any case.
    early_deliveries_max: int = 0
    #: Octets of a delivery tag, at most 32 (Part 2 §2.8.7).
    delivery_tag_max: int = 32
    #: Bytes of output waiting for a slow peer before we stop producing more.
    output_max: int = 1 * MIB
    #: Seconds without progress of a blocked write before the connection is dropped.
    write_stall_s: float = 30.0
    #: Seconds from accept to open, absolute; protects against slow-loris attacks.
    handshake_s: float = 10.0
    #: Octets of the header that a proxy sends first (PROXY protocol §2.2 allows 64 KiB). Only certificates of clients,
    #: which are not used here, come near.
    proxy_header_max: int = 2 * KIB
    #: Seconds of ``handshake_s`` that the TLS handshake may take.
    tls_handshake_s: float = 5.0
    #: Octets of one WebSocket message, which may hold several frames.
    websocket_message_max: int = 1 * MIB
    #: Octets of a WebSocket handshake, including the body of a refusal; and, before the peer has logged
    #: in, octets that may arrive without completing a message.
    websocket_stranger_max: int = 64 * KIB
    #: Further octets, beside those of messages, that may arrive without completing a message after
    #: login: frame headers, of which empty frames consist, and pings.
    websocket_overhead_max: int = 64 * KIB
    #: Seconds that the closing of a WebSocket may take: to deliver our last message, and to receive the peer's.
    websocket_linger_s: float = 1.0
    #: Seconds that a peer has to answer our close.
    close_grace_s: float = 5.0
    #: Idle timeout that we advertise (seconds); the peer is dropped after twice this time.
    idle_timeout_s: float = 60.0
    #: Shortest idle timeout accepted from a peer (seconds); a peer that demands a shorter one is refused.
    idle_timeout_min_s: float = 0.1
    #: Connections per listener.
    connections_max: int = 10_000
    #: Connections per address, and per user, at all listeners together.
    connections_per_address_max: int = 5_000
    connections_per_user_max: int = 1_000
    #: Connections that have not logged in yet, at all listeners together.
    connections_unauthenticated_max: int = 1_000
    #: Connections that have not logged in yet, per address.
    connections_unauthenticated_per_address_max: int = 100
    #: Seconds by which the answer to a failed login is delayed, the same for every cause.
    failed_login_delay_s: float = 1.0
    #: Maximum of that delay, which doubles with each further failure of an address or a user.
    failed_login_delay_max_s: float = 8.0
    #: Seconds after its last failure when the failures of an address or a user are forgotten.
    failed_login_memory_s: float = 60.0
    #: Failures of an address after which its connections are refused until the failures are forgotten.
    failed_logins_max: int = 100
    #: Addresses and users whose failures are remembered.
    failed_logins_kept: int = 10_000
    #: SCRAM iterations that a server may ask of us; each costs CPU time.
    scram_iterations_max: int = 100_000
    #: Characters of one token.
    token_size_max: int = 8 * KIB
    #: Tokens that one connection may hold at a time.
    tokens_max: int = 1_000
    #: Seconds from open to the first valid token, where a login alone gives no rights.
    token_deadline_s: float = 20.0
    #: Bytes of a JSON Web Key Set, with which tokens are verified.
    jwks_size_max: int = 1 * MIB
    #: Bytes of one request that puts a token; any client that reaches the port may send one.
    token_message_size_max: int = 64 * KIB
    #: Bytes of one SASL response passed to a mechanism.
    sasl_response_max: int = 8 * KIB
    #: Bytes that a client may send ahead of the answer to its login.
    login_ahead_max: int = 64 * KIB
    #: Distinct destinations that one anonymous-terminus link keeps open at a time.
    relay_targets_max: int = 256
    #: Bytes of messages that wait at one link of a route for the next node. Credit beyond it, at the size of recent messages, is not
    #: passed on; at most four times as much waits when messages become larger.
    splice_bytes_max: int = 8 * MIB
    #: Links to destinations of one address between which messages are distributed.
    fan_legs_max: int = 8
    #: Nodes of a mesh that one node knows, and neighbours of one node.
    mesh_nodes_max: int = 1_024
    mesh_neighbours_max: int = 64
    #: Edges of one node of a mesh, which count neither as nodes nor as neighbours.
    mesh_edges_max: int = 1_024
    #: Receivers of clients of one node of a mesh that share an address as its destinations.
    mesh_receivers_max: int = 64
    #: Addresses that one node of a mesh offers, those of all its nodes together, and patterns among these.
    mesh_node_addresses_max: int = 10_000
    mesh_addresses_max: int = 100_000
    mesh_patterns_max: int = 1_000
    #: Addresses in one message about them; more are sent in parts.
    mesh_part_max: int = 500
    #: Octets of one message between neighbours of a mesh.
    mesh_message_max: int = 64 * KIB
    #: Messages about the mesh that wait for a neighbour; one that does not take them is disconnected.
    mesh_records_waiting_max: int = 4_096
    #: Octets of the id of a node, an address or a URL in a mesh.
    mesh_name_max: int = 255
    #: URLs of one node of a mesh.
    mesh_urls_max: int = 16
    #: Nodes that a route passes through, and nodes of a tree of routes to several destinations.
    mesh_hops_max: int = 16
    mesh_tree_max: int = 256
    #: Links of routes that one node opens, or accepts, on the connection to a neighbour.
    mesh_legs_max: int = 4_096
    #: Direct connections to destinations that one node of a mesh opens.
    mesh_direct_max: int = 16
    #: Links of clients that seek a path through a mesh at a time, because nodes on the way or destinations have
    #: refused them, or no destination is known; further ones are refused at once.
    mesh_seeking_max: int = 4_096
    #: Highest channel number on connections of members of a mesh that have logged in, unless ``channel_max`` is higher.
    mesh_channel_max: int = 1_023
    #: Links that a node of a mesh keeps for replies to callers at other nodes, beyond those of replies that are
    #: being streamed, which are bounded by the same number; the least recently used is detached.
    mesh_reply_links_max: int = 1_024
    #: Connections of one bridge to the broker outside for sessions of clients, one each.
    mesh_bridge_sessions_max: int = 256
    #: Changes of the links, and of the addresses, of one node that are sent and accepted in a second.
    mesh_updates_max: int = 20
    #: Seconds for which records of nodes out of reach are kept.
    mesh_kept_s: float = 600.0
    #: Streamed or unary requests that one connection may have running at a time.
    requests_running_max: int = 4_096
    #: Rows returned by one management query; ask for the next ones by offset.
    management_rows_max: int = 1_000
    #: Management nodes that may be registered.
    management_nodes_max: int = 100
    #: Bytes of properties, filters, maps and similar data from the peer's attaches and begins on one
    #: connection, beyond the first KiB of each, as long as their links and sessions exist. Each element
    #: counts as eight bytes, since some array elements take no room.
    attach_bytes_max: int = 4 * MIB
    #: Length of an address or link name in characters.
    name_max: int = 1_024
    #: Bytes of messages that all nodes of a broker hold together.
    broker_bytes_max: int = 1024 * MIB
    #: Bytes of messages that one queue holds in memory, unless its declaration differs.
    queue_bytes_max: int = 512 * MIB
    #: Bytes and number of messages that a queue with a store keeps in memory; later messages are read
    #: from the store when their turn comes.
    queue_memory_bytes_max: int = 16 * MIB
    queue_memory_messages_max: int = 50_000
    #: Bytes of messages that such a queue holds in memory and in the store, unless its declaration differs.
    queue_stored_bytes_max: int = 64 * 1024 * MIB
    #: Nodes of a broker: declared ones, and those created on first use or dynamically.
    nodes_max: int = 100_000
    #: Exchanges of one virtual host, including the standard ones.
    exchanges_max: int = 10_000
    #: Bindings of all exchanges of one virtual host.
    bindings_max: int = 1_000_000
    #: Bindings that a peer gets in one list.
    bindings_listed_max: int = 1_000
    #: Characters and words of a routing key or of the pattern of a binding; longer ones are refused.
    routing_key_max: int = 255
    routing_words_max: int = 128
    #: Routing keys of one message: its own, and those in the headers CC and BCC.
    routing_keys_max: int = 100
    #: Patterns and bindings examined to route one message, a few at a time.
    routing_looks_max: int = 1_000_000
    #: The same for a dead letter, which is routed in one step; also the maximum number of its queues.
    dead_letter_looks_max: int = 250
    #: Bindings of one session that end with it; all are removed at once.
    scoped_bindings_max: int = 1_000
    #: Bytes of the last message that an exchange remembers for new bindings (``qpid.ive``); of a larger one
    #: nothing is remembered. It counts towards the bytes of the broker.
    last_message_max: int = 1 * MIB
    #: Bytes of the arguments of one queue, exchange or binding. The memory that they take counts towards
    #: the bytes of the broker.
    arguments_bytes_max: int = 16 * KIB
    #: Aliases of one node.
    aliases_max: int = 100
    #: Dynamic nodes that one connection may have.
    dynamic_nodes_max: int = 1_000
    #: Seconds between the second failure of a message and its next delivery, doubled with each
    #: further failure up to the maximum. 0 retries at once, however often it fails.
    retry_pause_s: float = 0.1
    retry_pause_max_s: float = 10.0
    #: Seconds for which a container holds a failed message itself, where the peer does not keep it for the
    #: pause that ``retry`` or ``delay_s`` requests. The message uses credit meanwhile.
    retry_held_max_s: float = 30.0
    #: Log lines about one subject per period, the period in seconds, and the number of subjects
    #: distinguished: peers and failing handlers can repeat the events that are logged.
    log_lines_max: int = 5
    log_period_s: float = 10.0
    log_keys_max: int = 1_000
    #: Message-ids that a queue remembers for duplicate detection; beyond it the oldest are forgotten
    #: early.
    duplicates_max: int = 100_000
    #: Messages waiting for one subscriber of a topic before its link is detached.
    backlog_max: int = 10_000
    #: Bytes of messages waiting for one subscriber of a topic.
    backlog_bytes_max: int = 64 * MIB
    #: Durable subscriptions of one topic. A message for all of them is written at once.
    stored_subscriptions_max: int = 1_000
    #: Subscriptions of one connection of AMQP 0-10, in all of its sessions: they end or are suspended at once
    #: when it is lost.
    connection_subscriptions_max: int = 1_000
    #: Termini that a broker keeps for links, attached or not, with their unsettled deliveries and the
    #: topic subscriptions that collect messages while no subscriber is attached; and those of one container.
    termini_max: int = 100_000
    termini_of_container_max: int = 10_000
    #: Longest timeout granted to a terminus (seconds); longer requests are reduced to it. 2**31, which
    #: some clients send for "for ever", would be 68 years.
    terminus_timeout_max_s: int = 7 * 86_400
    #: Outcomes that the target of a link keeps to detect duplicates. The sender cannot have missed more
    #: outcomes than a window of credit.
    target_outcomes_max: int = 5_000
    #: Bytes of unfinished messages that the targets of all detached links keep together.
    unfinished_bytes_max: int = 64 * MIB
    #: Partitions of one log.
    log_partitions_max: int = 1_024
    #: Bytes that a partition of a log holds in memory without a store, unless its declaration differs;
    #: the oldest records are dropped first.
    log_bytes_max: int = 64 * MIB
    #: Bytes of the newest records that a partition of a log keeps in memory with a store.
    log_tail_bytes_max: int = 4 * MIB
    #: Bytes read from a log at a time; at least one chunk is read.
    log_read_bytes_max: int = MIB
    #: Bytes cached for readers of logs that are far behind, for all of them together.
    log_cache_bytes_max: int = 64 * MIB
    #: Bytes of one batch of records; a larger record is sent in a batch of its own.
    log_batch_bytes_max: int = 256 * KIB
    #: Groups with a cursor on one log.
    log_groups_max: int = 1_000
    #: Eras of a log: starts of the broker for which it remembers its end offsets.
    log_eras_max: int = 20
    #: Holds on one log, and seconds that each may last.
    log_holds_max: int = 100
    log_hold_max_s: float = 86_400.0
    #: Messages of one node whose durations the journal measures.
    journal_timed_max: int = 100_000
    #: Bytes staged for epochs (credit is withheld once they are reached, so the last message may exceed
    #: them), attempts with staged messages, and seconds after which uncommitted ones are dropped.
    staged_bytes_max: int = 1024 * MIB
    stages_max: int = 10_000
    stage_s: float = 86_400.0
    #: Messages in one batch that is staged.
    batch_messages_max: int = 1_000
    #: Producers that publish by epochs at one node, seconds of silence after which one may be forgotten
    #: in favour of another (its later messages then count as new), and runs remembered for each.
    epoch_producers_max: int = 1_000
    epoch_producer_s: float = 2_592_000.0
    epoch_runs_max: int = 100
    #: Writes to one epoch, and characters of the plan given with each.
    epoch_writes_max: int = 100
    epoch_plan_max: int = 1_024
    #: Groups that lease messages of one queue, messages that each may hold, and the longest time that a
    #: lease with an expiry may last without renewal (seconds).
    leases_max: int = 100
    lease_messages_max: int = 100_000
    lease_ttl_max_s: float = 604_800.0
    #: Dead-letterings of a message that its annotations list.
    dead_letter_history_max: int = 16
    #: Times that a message is dead-lettered in a row without a consumer, and copies of it that exchanges
    #: may make on that way, after the first dead-lettering.
    dead_letter_hops_max: int = 128
    dead_letter_copies_max: int = 1_000
    #: Bytes to which modified outcomes may enlarge the annotations of a message.
    annotations_max: int = 64 * KIB
    #: Undischarged transactions of one session.
    transactions_max: int = 100
    #: Posts, acquisitions and retirements of one transaction (Part 4 §4.4). A post to a topic counts once
    #: for each of its durable subscriptions, and each dead letter of a retirement, or each of its copies for
    #: such subscriptions, counts four times.
    transaction_work_max: int = 10_000
    #: Seconds from the declaration of a transaction until it is rolled back.
    transaction_s: float = 60.0
    #: Branches of distributed transactions of a broker, those included that are remembered because they were
    #: rolled back for an error or a timeout.
    branches_max: int = 1_000
    #: The same of one user in one virtual host. Prepared branches stay until they are decided: no user can
    #: take all places with them.
    branches_user_max: int = 250
    #: Seconds from the start of a branch until it is rolled back, unless it is prepared or has a timeout of
    #: its own, and the longest such timeout.
    branch_s: float = 60.0
    branch_timeout_max_s: float = 86_400.0
    #: Seconds for which a branch is remembered that was rolled back for an error or a timeout.
    branch_kept_s: float = 60.0
    #: Octets at the start of a message that are searched for the trace context of its sender; 0 searches
    #: none. Each message to a node is searched, so large bodies would cost time.
    trace_context_within: int = 16 * KIB
    #: Seconds without progress after which deliveries, queues, senders and handlers are reported as stuck; 0 for
    #: never.
    stuck_after_s: float = 300.0
    #: Nodes that metrics name at a time, one set of values for each; further ones are left out, and counted.
    metrics_nodes_max: int = 1_000
    #: Sessions at the HTTP door, each of which is a connection of its user.
    http_sessions_max: int = 1_000
    #: Sessions of one user at the HTTP door, or of one address without a login: at most half of all.
    http_sessions_user_max: int = 100
    #: Seconds without a request, and from the login, after which a session of a browser ends.
    http_session_idle_s: float = 1_800.0
    http_session_s: float = 28_800.0
    #: Seconds for which the login in the header of a request serves further requests with the same one.
    http_login_kept_s: float = 60.0
    #: Octets of the body of a request at the HTTP door, and seconds for it to arrive.
    http_body_max: int = 1 * MIB
    http_body_s: float = 30.0
    #: Octets of the line and the headers of a request at the HTTP door.
    http_head_max: int = 16 * KIB
    #: Seconds for which a connection of the HTTP door stays open without a request.
    http_idle_s: float = 60.0
    #: Answers of the HTTP door that go on, such as live views, at a time.
    http_streams_max: int = 100
    #: Such answers for one user, or for one address without a login: at most half of all.
    http_streams_user_max: int = 20
    #: Rows of one page of the JSON API.
    http_rows_max: int = 500
    #: Pairs of links for HTTP over AMQP of one connection, and bytes of its requests that wait with those of
    #: answers that it has not taken.
    management_pairs_max: int = 16
    management_bytes_max: int = 4 * MIB
    #: Nodes whose depth and rates the console records, for all sessions together: some 30 KB each.
    console_watched_nodes_max: int = 200
    #: Filters in the filter-set of one source.
    filters_max: int = 16
    #: Entries of all the property filters of one source together.
    filter_entries_max: int = 16
    #: Bytes of the selectors, bindings and other texts in the filters of one source together.
    filter_text_max: int = 4 * KIB
    #: Tokens of one selector; parsing takes as many steps.
    selector_terms_max: int = 512
    #: Depth of nested operators and parentheses in a selector.
    selector_depth_max: int = 64
    #: Wildcards in all LIKE patterns of one selector.
    like_wildcards_max: int = 64
    #: Characters of a text that a pattern is matched with, or that a selector computes; longer ones
    #: match no pattern.
    filter_subject_max: int = 4 * KIB
    #: Steps that all filters of a source may take for one message, of a third of a microsecond each: for
    #: decoding and comparing fields, and for searching patterns in them. Filters that need more do not
    #: match, such as with 2,500 application properties, or with properties of more than a megabyte.
    filter_steps_max: int = 10_000
    #: Shortest time between two messages of a schedule.
    schedule_every_min_s: float = 1.0
    #: Messages that a schedule sends for times at which the broker did not run; earlier ones are left out.
    schedule_catch_up_max: int = 100
    #: Bytes of the trace of one connection, and of all traces of one folder together.
    trace_bytes_max: int = 64 * MIB
    trace_total_bytes_max: int = 1024 * MIB
    #: Watches of frames that operators have open at a time, such as ladders of the console.
    frame_watches_max: int = 10
    #: Connections that one watch of frames follows; later ones are only counted.
    frame_watch_connections_max: int = 50
    #: Frames that one watch keeps, the latest ones; each is one line of text.
    frame_watch_rungs_max: int = 1_000

    def __post_init__(self) -> None:
        for name, kind, what, least, most in _CHECKS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} must be {what} from {least} to {most}, got {value!r:.50}")


#: Of each field its name, types, description in words, and bounds.
_CHECKS: Final = [
    (field.name, (int, float), "a number of seconds", *_RANGES.get(field.name, (0, SECONDS_MAX)))
    if field.type is float
    else (field.name, (int,), "a whole number", *_RANGES.get(field.name, (0, _COUNT_MAX)))
    for field in fields(Limits)
]


DEFAULT_LIMITS = Limits()
