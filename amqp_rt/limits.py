"""Every bound that a peer can push against, each with its reason.

One frozen :class:`Limits` travels from the listener or dialler to the engine. Nothing
that comes from the wire bounds a loop or an allocation; these numbers do. Each is
tested at the bound and one above.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import fields

KIB = 1024
MIB = 1024 * KIB

#: The longest time that a setting may name, in seconds: three hundred years. It can be added to a
#: time of day and counted in milliseconds, which infinity cannot.
SECONDS_MAX: Final = 1e10


def check_seconds(
    name: str, value: float, *, least: float = 0.0, most: float = SECONDS_MAX
) -> None:
    """Refuse a time that is no number from *least* to *most*.

    NaN is refused too: it compares with nothing, so that a deadline made of it never comes or comes
    at once, as the comparison happens to be written.

    Raises:
        ValueError: The sentence has the name, the bounds and the value.
    """
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least:g} to {most:g} seconds, got {value}")


#: Least and most value of fields that the protocol bounds, or that would stop everything.
_RANGES: Final = {
    # Part 2 §2.3.1 says 512; who tests a peer may want less, but a frame has eight octets.
    "frame_size_before_open": (8, 2**32 - 1),
    "frame_size_max": (512, 2**32 - 1),
    "channel_max": (0, 2**16 - 1),
    "handle_max": (0, 2**32 - 1),
    "session_window": (1, 2**31 - 1),
    "delivery_tag_max": (0, 32),
    "idle_timeout_s": (0.0, (2**32 - 1) / 1000),
}
#: The highest value of the others: what a signed long of the protocol holds.
_COUNT_MAX: Final = 2**63 - 1


class Limits(Struct, frozen=True, gc=False):
    """Bounds of one connection, unless a field says otherwise."""

    #: Largest frame taken before open (bytes). Part 2 says 512; tokens and open
    #: properties need more in practice.
    frame_size_before_open: int = 8 * KIB
    #: ``max-frame-size`` that we advertise, whatever the peer says (bytes).
    frame_size_max: int = 64 * KIB
    #: ``max-message-size`` of links whose messages are assembled in memory (bytes). Larger durable ones
    #: for a queue in a store go there in pieces.
    message_size_max: int = 16 * MIB
    #: ``max-message-size`` advertised by links that stream; 0 means no limit.
    streaming_message_size_max: int = 0
    #: Highest channel number: 64 sessions. Each session costs tables and windows.
    channel_max: int = 63
    #: Highest handle: 256 links a session.
    handle_max: int = 255
    #: One budget for nested lists, maps, arrays and described values.
    nesting_max: int = 32
    #: Elements decoded per frame body or message section, zero-width ones counted.
    elements_max: int = 65_536
    #: Sections in one message; data and sequence sections may repeat.
    sections_max: int = 10_000
    #: Transfer frames that we let the peer send ahead of us per session.
    session_window: int = 2_048
    #: Bytes of assembled or half-received deliveries that a session may hold before its
    #: window is no longer topped up.
    session_window_bytes: int = 64 * MIB
    #: Unsettled deliveries in one session, in either direction.
    unsettled_max: int = 5_000
    #: Sections that are counted to say how far a delivery has come when its link is resumed. One of
    #: more is resumed from its beginning: a peer that comes back all the time must not make us count.
    resume_sections_max: int = 100
    #: Deliveries that a peer may begin on a link that it attaches before it has any credit there (S3
    #: 2.3.8). The standard knows none; all of them together have at most ``message_size_max`` bytes as
    #: long as the attach is not answered.
    early_deliveries_max: int = 0
    #: Delivery tags are at most 32 octets by Part 2 §2.8.7.
    delivery_tag_max: int = 32
    #: Bytes waiting for a peer that does not read, before we stop producing.
    output_max: int = 1 * MIB
    #: Seconds without any progress of a blocked write before the connection is dropped.
    write_stall_s: float = 30.0
    #: Seconds from accept to open, absolute; it stops slow lorises.
    handshake_s: float = 10.0
    #: Seconds of them that the TLS handshake may take.
    tls_handshake_s: float = 5.0
    #: Octets of one WebSocket message; it may hold several frames.
    websocket_message_max: int = 1 * MIB
    #: Octets of a WebSocket's handshake, the body of a refusal among them; and octets that may come
    #: without a whole message, before the peer has logged in.
    websocket_stranger_max: int = 64 * KIB
    #: Octets that may come without a whole message beside those of messages, from then on: heads of
    #: frames, which may be as small as nothing, and pings.
    websocket_overhead_max: int = 64 * KIB
    #: Seconds that a WebSocket's peer has to hear our last word, and to say its own.
    websocket_linger_s: float = 1.0
    #: Seconds that a peer has to answer our close.
    close_grace_s: float = 5.0
    #: Idle timeout that we advertise (seconds); the peer is dropped after twice as long.
    idle_timeout_s: float = 60.0
    #: A peer that asks for more empty frames than one in this many seconds is refused.
    idle_timeout_min_s: float = 0.1
    #: Connections per listener.
    connections_max: int = 10_000
    #: Connections of one address, and of one user: at all listeners together.
    connections_per_address_max: int = 5_000
    connections_per_user_max: int = 1_000
    #: Connections that have not logged in yet, at all listeners together.
    connections_unauthenticated_max: int = 1_000
    #: Connections that have not logged in yet, per address.
    connections_unauthenticated_per_address_max: int = 100
    #: Seconds that a failed login waits for its answer, whatever the cause.
    failed_login_delay_s: float = 1.0
    #: It doubles with each further failure of an address or a user, up to this.
    failed_login_delay_max_s: float = 8.0
    #: Seconds after its last failure at which an address or a user begins anew.
    failed_login_memory_s: float = 60.0
    #: Failures of an address after which it is turned away at the door, until they are forgotten.
    failed_logins_max: int = 100
    #: Addresses and users of which failures are remembered.
    failed_logins_kept: int = 10_000
    #: Iterations of SCRAM that a server may ask of us; each costs CPU.
    scram_iterations_max: int = 100_000
    #: Characters of one token.
    token_size_max: int = 8 * KIB
    #: Tokens that one connection may have at a time.
    tokens_max: int = 1_000
    #: Seconds from open to the first good token, where a login alone gives no rights.
    token_deadline_s: float = 20.0
    #: Bytes of a set of keys that tokens are verified with.
    jwks_size_max: int = 1 * MIB
    #: Bytes of one request for a token, which anybody may send who reaches the port.
    token_message_size_max: int = 64 * KIB
    #: Bytes of one SASL response that a mechanism is given.
    sasl_response_max: int = 8 * KIB
    #: Bytes that a client may send ahead of the answer to its login.
    login_ahead_max: int = 64 * KIB
    #: Distinct destinations that one anonymous-terminus link keeps open at a time.
    relay_targets_max: int = 256
    #: Streamed or unary requests that one connection may have running at a time.
    requests_running_max: int = 4_096
    #: Rows that one management query returns; the next ones are asked for by their offset.
    management_rows_max: int = 1_000
    #: Management nodes that may be registered.
    management_nodes_max: int = 100
    #: Bytes of properties, filters, maps and the like that the peer has said in the attaches and begins
    #: of one connection, beyond the first KiB of each, as long as their links and sessions are there.
    #: Elements count as eight bytes each, since arrays have some that take no room.
    attach_bytes_max: int = 4 * MIB
    #: Length of an address or link name in characters.
    name_max: int = 1_024
    #: Bytes of messages that all nodes of a broker hold together.
    broker_bytes_max: int = 1024 * MIB
    #: Bytes of messages that one queue holds in memory, unless it is declared otherwise.
    queue_bytes_max: int = 512 * MIB
    #: Bytes and number of messages that a queue with a store keeps in memory; what comes then is read
    #: from the store when its turn comes.
    queue_memory_bytes_max: int = 16 * MIB
    queue_memory_messages_max: int = 50_000
    #: Bytes of messages that such a queue holds altogether, unless it is declared otherwise.
    queue_stored_bytes_max: int = 64 * 1024 * MIB
    #: Nodes of a broker: declared ones, and those that links make on first use or dynamically.
    nodes_max: int = 100_000
    #: Exchanges of one virtual host, the standard ones included.
    exchanges_max: int = 10_000
    #: Bindings of all exchanges of one virtual host.
    bindings_max: int = 1_000_000
    #: Characters of a routing key or of the pattern of a binding, and its words; longer ones are refused.
    routing_key_max: int = 255
    routing_words_max: int = 128
    #: Routing keys of one message: its own, and those of the headers CC and BCC.
    routing_keys_max: int = 100
    #: Places of patterns and bindings that are looked at to route one message, a few at a time.
    routing_looks_max: int = 1_000_000
    #: Of them those for a dead letter, which cannot wait; and the queues that it goes to at most.
    dead_letter_looks_max: int = 1_000
    #: Bytes of the arguments of one queue, exchange or binding. What they take in memory counts as
    #: bytes of the broker.
    arguments_bytes_max: int = 16 * KIB
    #: Other addresses of one node.
    aliases_max: int = 100
    #: Dynamic nodes that one connection may have.
    dynamic_nodes_max: int = 1_000
    #: Seconds between the second failure of a message and its next delivery; they double with each
    #: further failure, up to the maximum. 0 retries at once, however often it fails.
    retry_pause_s: float = 0.1
    retry_pause_max_s: float = 10.0
    #: Lines about the same thing at the same place that are logged in this many seconds, and things
    #: that are told apart: peers and failing handlers can repeat what they cause.
    log_lines_max: int = 5
    log_period_s: float = 10.0
    log_keys_max: int = 1_000
    #: Message-ids that a queue remembers to know again what comes twice; beyond it the first are
    #: forgotten before their time.
    duplicates_max: int = 100_000
    #: Messages that wait for one subscriber of a topic before its link is detached.
    backlog_max: int = 10_000
    #: Bytes of those messages.
    backlog_bytes_max: int = 64 * MIB
    #: Termini that a broker keeps for links, attached or not: their unsettled deliveries, and the
    #: subscriptions of topics that gather while no subscriber is attached; and those of one container.
    termini_max: int = 100_000
    termini_of_container_max: int = 10_000
    #: Seconds that a terminus may ask to be kept; it gets no more. 2**31, which some clients say for
    #: ever, would be 68 years.
    terminus_timeout_max_s: int = 7 * 86_400
    #: Outcomes that the target of a link keeps to know again what comes twice. More than a window of
    #: credit cannot have been said without being heard.
    target_outcomes_max: int = 5_000
    #: Bytes of unfinished messages that the targets of all detached links keep.
    unfinished_bytes_max: int = 64 * MIB
    #: Partitions of one log.
    log_partitions_max: int = 1_024
    #: Bytes that a partition of a log holds in memory when there is no store, unless it is declared
    #: otherwise; the oldest records go first.
    log_bytes_max: int = 64 * MIB
    #: Bytes of the newest records that a partition of a log has in memory when there is a store.
    log_tail_bytes_max: int = 4 * MIB
    #: Bytes that are read of a log at a time; at least one chunk.
    log_read_bytes_max: int = MIB
    #: Bytes of what was read for readers of logs that are far behind, of all of them together.
    log_cache_bytes_max: int = 64 * MIB
    #: Groups that have a cursor on one log.
    log_groups_max: int = 1_000
    #: Starts of the broker of which a log knows where it was then.
    log_eras_max: int = 20
    #: Holds on one log, and seconds that each may last.
    log_holds_max: int = 100
    log_hold_max_s: float = 86_400.0
    #: Messages of one node of which the journal knows for how long they have been there.
    journal_timed_max: int = 100_000
    #: Bytes that are staged for epochs (credit is withheld before, and the last message may go beyond),
    #: attempts that have staged something, and seconds after which what was not committed is dropped.
    staged_bytes_max: int = 1024 * MIB
    stages_max: int = 10_000
    stage_s: float = 86_400.0
    #: Producers that publish by epochs at one node, seconds without a word after which one of them makes
    #: room for another (what it sends then counts as new), and runs of each that are remembered.
    epoch_producers_max: int = 1_000
    epoch_producer_s: float = 2_592_000.0
    epoch_runs_max: int = 100
    #: Writes to one epoch, and characters in which each may say how it was planned.
    epoch_writes_max: int = 100
    epoch_plan_max: int = 1_024
    #: Groups that lease messages of one queue, messages that each may have, and seconds that what it
    #: has may stay aside without a word from it, if it asks for an end at all.
    leases_max: int = 100
    lease_messages_max: int = 100_000
    lease_ttl_max_s: float = 604_800.0
    #: Times that a message was given up, of which it tells in its annotations.
    dead_letter_history_max: int = 16
    #: Times that a message is dead-lettered in a row without a consumer, and copies of it that exchanges
    #: may make on that way, after the first of them.
    dead_letter_hops_max: int = 128
    dead_letter_copies_max: int = 1_000
    #: Bytes to which modified outcomes may let the annotations of a message grow.
    annotations_max: int = 64 * KIB
    #: Transactions of one session that are not discharged.
    transactions_max: int = 100
    #: Posts, acquisitions and retirements of one transaction (Part 4 §4.4).
    transaction_work_max: int = 10_000
    #: Seconds from the declaration of a transaction until it is rolled back.
    transaction_s: float = 60.0
    #: Filters in the filter-set of one source.
    filters_max: int = 16
    #: Entries of all the property filters of one source together.
    filter_entries_max: int = 16
    #: Bytes of a selector, a binding or another text in a filter.
    filter_text_max: int = 4 * KIB
    #: Tokens of one selector; parsing costs as many turns.
    selector_terms_max: int = 512
    #: Operators and parentheses inside each other in a selector.
    selector_depth_max: int = 64
    #: Wildcards in all LIKE patterns of one selector.
    like_wildcards_max: int = 64
    #: Characters of a message's text that a pattern is matched with, or that a selector makes;
    #: a longer one matches no pattern.
    filter_subject_max: int = 4 * KIB
    #: Steps that all filters of a source may take for one message: one for each place at which a
    #: pattern is tried. What takes more does not match.
    filter_steps_max: int = 10_000
    #: Bytes of the trace of one connection, and of all traces of one folder together.
    trace_bytes_max: int = 64 * MIB
    trace_total_bytes_max: int = 1024 * MIB

    def __post_init__(self) -> None:
        for name, kind, what, least, most in _CHECKS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} must be {what} from {least} to {most}, got {value!r:.50}")


#: Of each field its name, its types, what it is in words, and its bounds.
_CHECKS: Final = [
    (field.name, (int, float), "a number of seconds", *_RANGES.get(field.name, (0, SECONDS_MAX)))
    if field.type is float
    else (field.name, (int,), "a whole number", *_RANGES.get(field.name, (0, _COUNT_MAX)))
    for field in fields(Limits)
]


DEFAULT_LIMITS = Limits()
