"""Options of the format ``amqp``: one table by which they are parsed, checked and explained.

Spark passes options as text with lower-cased names, and rejects none. A misspelt one would silently give a
wrong result, so options that are not in the table are refused here, with the closest name as a suggestion.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from amqp_rt.durations import parse_duration

from . import kafka_names
from .schema import COLUMNS

if TYPE_CHECKING:
    from .endpoints import Endpoint

SOURCE: Final = "source"
SINK: Final = "sink"

#: Brokers whose logs can be read.
OURS: Final = "amqp_rt"
RABBITMQ: Final = "rabbitmq"
EVENT_HUBS: Final = "eventhubs"


class Option(Struct, frozen=True):
    """Option of the format, with the function that parses its text."""

    name: str
    #: Name of the field of :class:`Options`.
    field: str
    read: Callable[[str], Any]
    #: ``source`` or ``sink``; empty for both.
    side: str
    help: str


class Options(Struct, frozen=True, kw_only=True):
    """Parsed options, with defaults for missing ones. Pickled on the way to executors."""

    url: str = ""
    addresses: tuple[str, ...] = ()
    address_pattern: str = ""
    credentials_file: str = ""
    credentials_env: str = ""
    mechanism: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    container_id: str = ""
    connect_timeout: float = 30.0
    retry_timeout: float = 120.0
    # Source.
    mode: str = "auto"
    logs: str = OURS
    group: str = ""
    starting_offsets: Any = "earliest"
    ending_offsets: Any = "latest"
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    min_messages: int = 0
    max_delay: float = 60.0
    min_partitions: int = 1
    min_per_partition: int = 1
    max_per_partition: int | None = None
    fail_on_data_loss: bool = True
    selector: str = ""
    credit: int = 1_000
    body: str = "auto"
    columns: tuple[str, ...] = ()
    raw: bool = False
    hold: float = 3_600.0
    lease_ttl: float | None = None
    spool_dir: str = ""
    on_undecodable: str = "fail"
    filter_pushdown: bool = False
    # Sink.
    delivery: str = ""
    producer: str = ""
    on_different_epoch: str = "fail"
    #: Folder in which Spark keeps the progress of the query, if the sink was given it.
    checkpoint: str = ""
    max_in_flight: int = 1_000
    max_bytes_in_flight: int = 16_777_216
    on_reject: str = "fail"
    durable: bool = True
    ordering_key: str = ""
    dedup_column: str = ""
    settle_timeout: float | None = None
    dead_letter_address: str = ""
    ignore_unknown_columns: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the broker, or of several brokers whose logs are one table."""
        return tuple(self.url.split(","))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The addresses; with several brokers, URLs that combine broker and address."""
        if len(self.urls) == 1:
            return self.addresses
        return tuple(f"{url}/{address}" for url in self.urls for address in self.addresses)

    def place(self, node: str) -> tuple[Endpoint, str]:
        """Return the broker of *node*, and its address there.

        Raises:
            ValueError: The node is at a broker that is not among the URLs.
        """
        urls = self.urls
        if len(urls) == 1:
            return self.endpoint, node
        for url in urls:
            if node.startswith(f"{url}/"):
                return self._endpoint(url), node[len(url) + 1 :]
        raise ValueError(f"{node!r} is at none of the brokers {', '.join(urls)}")

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the broker, if there is only one."""
        return self._endpoint(self.url)

    def _endpoint(self, url: str) -> Endpoint:
        # Processes of Spark's that ask for the columns only do without the engine.
        from .endpoints import Endpoint

        return Endpoint(
            url=url,
            credentials_file=self.credentials_file,
            credentials_env=self.credentials_env,
            mechanism=self.mechanism,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            container_id=self.container_id,
            timeout_s=self.connect_timeout,
            retry_s=self.retry_timeout,
        )


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _names(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(filter(None, (each.strip() for each in text.split(",")))))
    if not found:
        raise ValueError("it is empty")
    return found


def _urls(text: str) -> str:
    """Return one or more URLs, without trailing slashes."""
    return ",".join(dict.fromkeys(each.rstrip("/") for each in _names(text)))


def _columns(text: str) -> tuple[str, ...]:
    found = _names(text)
    for name in found:
        if name not in COLUMNS:
            meant = kafka_names.column_hint(name) or _meant(name, COLUMNS)
            raise ValueError(f"there is no column {name!r}{meant}")
    return found


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("it is a whole number")
    return int(text)


def _positive(text: str) -> int:
    if not _whole(text):
        raise ValueError("it is a whole number from 1 on")
    return int(text)


def _folder(text: str) -> str:
    """Return the absolute path in *text*, a path or a ``file:`` URL."""
    given = _text(text)
    scheme, colon, path = given.partition(":")
    if scheme.lower() == "file" and colon:
        given = "/" + path.lstrip("/")
    elif "://" in given:
        raise ValueError("it is a folder of a file system that every machine mounts, not a URL")
    if not os.path.isabs(given):
        raise ValueError(
            "it is a path from the root on, since each process has a folder of its own"
        )
    return given


def _yes(text: str) -> bool:
    given = text.strip().lower()
    if given not in ("true", "false"):
        raise ValueError("it is true or false")
    return given == "true"


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        given = text.strip().lower()
        if given not in known:
            raise ValueError(f"it is one of {', '.join(known)}")
        return given

    return read


def moment(text: str) -> int:
    """Parse a time as milliseconds since 1970: their number, or ISO 8601 with its offset from UTC."""
    given = text.strip()
    if given.lstrip("-").isdecimal():
        return int(given)
    try:
        moment = datetime.fromisoformat(given)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(
            "it is milliseconds since 1970, or a time with its zone such as 2026-01-31T12:00:00Z"
        )
    # In whole numbers: a product of floats may be next to the millisecond.
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _offsets(*words: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        given = text.strip()
        if given.lower() in words:
            return given.lower()
        try:
            found = json.loads(given)
            return {
                str(address): {int(part): _whole(str(offset)) for part, offset in parts.items()}
                for address, parts in found.items()
            }
        except (AttributeError, ValueError):
            pass
        raise ValueError(
            f'it is {", ".join(words)}, or offsets as JSON: {{"orders": {{"0": 120, "1": 77}}}}, each from 0 on '
            "(for Kafka's -2, earliest, leave the partition out)"
        )

    return read


_DECLARED: Final = (
    Option(
        "url",
        "url",
        _urls,
        "",
        "Where the broker is: amqp://host:port, amqps://… or amqp+unix://…, without a password. Required. A source of logs takes several, with commas between them: the logs of that address at each are one table.",
    ),
    Option(
        "address",
        "addresses",
        _names,
        "",
        "The node. A source of logs takes several, with commas between them.",
    ),
    Option(
        "addressPattern",
        "address_pattern",
        _text,
        SOURCE,
        "Instead of address: all logs whose names are like this, with * for anything and ? for one character. A stream looks for new ones before each micro-batch, and reads them from their start.",
    ),
    Option(
        "credentialsFile",
        "credentials_file",
        _text,
        "",
        "A file on each machine that holds one line, user:password.",
    ),
    Option(
        "credentialsEnv",
        "credentials_env",
        _text,
        "",
        "An environment variable, on each machine, that holds user:password.",
    ),
    Option(
        "sasl.mechanism",
        "mechanism",
        _text,
        "",
        "PLAIN, SCRAM-SHA-256, EXTERNAL, ANONYMOUS; chosen by the credentials by default.",
    ),
    Option(
        "tls.ca",
        "tls_ca",
        _text,
        "",
        "PEM file of the authorities to believe, for amqps; by default those of the system.",
    ),
    Option(
        "tls.cert",
        "tls_cert",
        _text,
        "",
        "PEM file of our certificate, for brokers that ask for one.",
    ),
    Option("tls.key", "tls_key", _text, "", "PEM file of its key, if that is another file."),
    Option(
        "containerId",
        "container_id",
        _text,
        "",
        "Prefix of the names of connections at the broker.",
    ),
    Option(
        "connectTimeout",
        "connect_timeout",
        parse_duration,
        "",
        "How long the broker may take to answer anything. Default 30s.",
    ),
    Option(
        "retryTimeout",
        "retry_timeout",
        parse_duration,
        "",
        "How long to connect again after a loss of the broker, counted from the loss, before the task or the query fails; also how long a task waits for room there. 0 for not at all. Default 2m.",
    ),
    Option(
        "mode",
        "mode",
        _one_of("auto", "log", "lease", "spool", "browse"),
        SOURCE,
        "log; lease (messages of a queue are set aside for a group until a stream has written them; a batch reads what the group has); spool (streams only: messages of a queue of any broker are kept in spoolDir); browse (batch only: what waits in a queue, without taking it); auto (default): log for streams, and by the kind of node for batches.",
    ),
    Option(
        "logs",
        "logs",
        _one_of(OURS, RABBITMQ, EVENT_HUBS),
        SOURCE,
        "Whose logs they are: amqp_rt (default), rabbitmq for streams of RabbitMQ 4, eventhubs, where group is the consumer group ($Default).",
    ),
    Option(
        "group",
        "group",
        _text,
        SOURCE,
        "Under which name the broker keeps how far the stream has got. Required for leases, and where a log is read from latest, from a time, or from where it was (committed).",
    ),
    Option(
        "startingOffsets",
        "starting_offsets",
        _offsets("earliest", "latest", "committed"),
        SOURCE,
        'earliest (default), latest, committed, or JSON: {"orders": {"0": 120}}.',
    ),
    Option(
        "startingTimestamp",
        "starting_timestamp",
        moment,
        SOURCE,
        "The first record to read is the first one from this time on.",
    ),
    Option(
        "endingOffsets",
        "ending_offsets",
        _offsets("latest"),
        SOURCE,
        "Batch: latest (default), or JSON of the first offsets that are not read.",
    ),
    Option(
        "endingTimestamp",
        "ending_timestamp",
        moment,
        SOURCE,
        "Batch: records from this time on are not read.",
    ),
    Option(
        "maxMessagesPerTrigger",
        "max_messages",
        _positive,
        SOURCE,
        "Messages in one micro-batch at most.",
    ),
    Option(
        "maxBytesPerTrigger",
        "max_bytes",
        _positive,
        SOURCE,
        "Bytes in one micro-batch, estimated by the partitions' mean sizes; at least one message for each partition that has some.",
    ),
    Option(
        "minMessagesPerTrigger",
        "min_messages",
        _whole,
        SOURCE,
        "A micro-batch waits until there are so many.",
    ),
    Option(
        "maxTriggerDelay",
        "max_delay",
        parse_duration,
        SOURCE,
        "… but not longer than this. Default 60s.",
    ),
    Option(
        "minPartitions",
        "min_partitions",
        _positive,
        SOURCE,
        "Tasks of one micro-batch at least, as long as there are messages for them.",
    ),
    Option(
        "minMessagesPerPartition",
        "min_per_partition",
        _positive,
        SOURCE,
        "Messages of one task at least: smaller partitions are read one after another by one task, but "
        "never by fewer tasks than minPartitions. Default 1: each by its own.",
    ),
    Option(
        "maxMessagesPerPartition",
        "max_per_partition",
        _positive,
        SOURCE,
        "Messages of one task at most; more tasks are made.",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        _yes,
        SOURCE,
        "Whether records that retention took before they were read end the query. Default true.",
    ),
    Option(
        "selector",
        "selector",
        _text,
        SOURCE,
        "A condition that the broker evaluates: messages that do not match are not read.",
    ),
    Option(
        "credit",
        "credit",
        _positive,
        SOURCE,
        "Messages on the way to a task, as long as they are no more than 16 MiB. Default 1000.",
    ),
    Option(
        "body",
        "body",
        _one_of("auto", "binary", "text", "json"),
        SOURCE,
        "auto (default): body as bytes, and body_variant typed, from JSON too; binary: bytes only; text: body is a string; json: body_variant is the parsed body.",
    ),
    Option(
        "columns",
        "columns",
        _columns,
        SOURCE,
        "The columns to make, with commas between them; by default all. Other columns are not decoded.",
    ),
    Option(
        "raw",
        "raw",
        _yes,
        SOURCE,
        "Adds the column message: the encoded bare message, which a sink sends again octet for octet. Default false.",
    ),
    Option(
        "hold",
        "hold",
        parse_duration,
        SOURCE,
        "How long retention is kept away from a micro-batch that is being read. Default 1h.",
    ),
    Option(
        "leaseTtl",
        "lease_ttl",
        parse_duration,
        SOURCE,
        "After how long without a word from the query its messages go back to the queue. By default they stay aside until the query goes on.",
    ),
    Option(
        "spoolDir",
        "spool_dir",
        _folder,
        SOURCE,
        "A folder that the driver and all workers see under one path, where mode=spool keeps messages until they are written. Of this query alone, like its checkpoint.",
    ),
    Option(
        "onUndecodable",
        "on_undecodable",
        _one_of("fail", "row"),
        SOURCE,
        "A message that cannot be decoded ends the query (fail, the default), or is a row with body_kind 'undecodable' and its octets as body.",
    ),
    Option(
        "filterPushdown",
        "filter_pushdown",
        _yes,
        SOURCE,
        "Batch: ranges of partition, offset and enqueued_time, and address, are left to the broker. It takes spark.sql.python.filterPushdown.enabled, which session() turns on. Default false.",
    ),
    Option(
        "delivery",
        "delivery",
        _one_of("exactly-once", "at-least-once"),
        SINK,
        "exactly-once stages messages and publishes a micro-batch in one step, which takes our broker. Default: exactly-once for streams, at-least-once for batches without producer.",
    ),
    Option(
        "producer",
        "producer",
        _text,
        SINK,
        "Whose epochs these are at the broker; by default the id of the query, which lives in its checkpoint. A batch that names one is published once per name.",
    ),
    Option(
        "onDifferentEpoch",
        "on_different_epoch",
        _one_of("fail", "skip"),
        SINK,
        "Reaction to a micro-batch that was published under its number with other messages: the query ends (fail, the default), or what is published counts and the messages are dropped (skip), which is right where messages differ each time they are made.",
    ),
    Option(
        "maxInFlight",
        "max_in_flight",
        _positive,
        SINK,
        "Messages that a task has sent and that have no answer yet. Default 1000.",
    ),
    Option(
        "maxBytesInFlight",
        "max_bytes_in_flight",
        _positive,
        SINK,
        "Bytes of those messages; a larger message goes alone. Default 16 MiB (16777216).",
    ),
    Option(
        "onReject",
        "on_reject",
        _one_of("fail", "skip", "deadletter"),
        SINK,
        "A message that the broker does not take ends the query (fail, the default), is left out (skip), or is sent to deadLetterAddress (deadletter), at least once.",
    ),
    Option(
        "deadLetterAddress",
        "dead_letter_address",
        _text,
        SINK,
        "Address for rejected messages with onReject=deadletter; annotations name their origin and the reason.",
    ),
    Option(
        "settleTimeout",
        "settle_timeout",
        parse_duration,
        SINK,
        "Maximum time for the outcome of a message, or for room for one. Default connectTimeout for answers, retryTimeout for room.",
    ),
    Option(
        "durable",
        "durable",
        _yes,
        SINK,
        "Whether messages are durable whose row has no value for it. Default true.",
    ),
    Option(
        "orderingKey",
        "ordering_key",
        _text,
        SINK,
        "A column by which messages choose their partition of a log.",
    ),
    Option(
        "dedupColumn",
        "dedup_column",
        _text,
        SINK,
        "Column that identifies each message, for duplicate detection by the broker: it becomes the message-id, and the property that Artemis reads.",
    ),
    Option(
        "ignoreUnknownColumns",
        "ignore_unknown_columns",
        _yes,
        SINK,
        "Whether columns that mean nothing are passed over. Default false: they are refused.",
    ),
)

#: Name in lower case → option.
OPTIONS: Final = {option.name.lower(): option for option in _DECLARED}

#: Options that Spark adds by itself.
_SPARKS: Final = {"path", "checkpointlocation", "queryname", "paths"}


def read_options(given: Mapping[str, str], side: str) -> Options:
    """Parse the options *given* to a *side*, ``source`` or ``sink``.

    Raises:
        ValueError: An option is invalid; one sentence names it and gives the remedy.
    """
    found: dict[str, Any] = {}
    for key, text in given.items():
        name = key.lower()
        option = OPTIONS.get(name)
        if option is None:
            if name in _SPARKS:
                if name == "checkpointlocation" and side == SINK:
                    found["checkpoint"] = str(text)
                continue
            known = [each.name for each in _DECLARED if each.side in ("", side)]
            meant = kafka_names.option_hint(key) or _meant(key, known)
            raise ValueError(f"amqp has no option {key!r}{meant}")
        if option.side not in ("", side):
            raise ValueError(f"the option {option.name} is for a {option.side}, not for a {side}")
        try:
            found[option.field] = option.read(str(text))
        except ValueError as error:
            # Secrets are never options, so the text may be shown.
            raise ValueError(f"the option {option.name} is {text!r:.80}, but {error}") from error
    options = Options(**found)
    if not options.url:
        raise ValueError("amqp needs the option url, such as amqp://localhost")
    if options.address_pattern and options.addresses:
        raise ValueError("give address or addressPattern, not both")
    if options.address_pattern and options.mode not in ("auto", "log"):
        raise ValueError("addressPattern is for logs: name the queues with address")
    if side == SOURCE and not options.addresses and not options.address_pattern:
        raise ValueError("amqp needs the option address: the node to read")
    if options.logs != OURS:
        _check_foreign(options)
    if len(options.urls) > 1 and (side == SINK or options.mode in ("lease", "spool")):
        what = "a sink" if side == SINK else f"mode={options.mode}"
        raise ValueError(f"{what} has one url: several are for logs and for browsing queues")
    if len(options.urls) > 1 and options.address_pattern:
        raise ValueError("addressPattern has one url: with several, name the logs with address")
    if (options.on_reject == "deadletter") != bool(options.dead_letter_address):
        raise ValueError("onReject=deadletter and deadLetterAddress go together")
    if side == SINK and len(options.addresses) > 1:
        raise ValueError("a sink has one address")
    if options.starting_timestamp is not None and options.starting_offsets != "earliest":
        raise ValueError("give startingOffsets or startingTimestamp, not both")
    if options.ending_timestamp is not None and options.ending_offsets != "latest":
        raise ValueError("give endingOffsets or endingTimestamp, not both")
    return options


def _check_foreign(options: Options) -> None:
    """Refuse options that other brokers than amqp_rt do not support."""
    refused = {
        "addressPattern": bool(options.address_pattern),
        "selector": bool(options.selector),
        "maxBytesPerTrigger": options.max_bytes is not None,
        "startingOffsets=committed": options.starting_offsets == "committed",
        f"mode={options.mode}": options.mode not in ("auto", "log"),
    }
    for what, given in refused.items():
        if given:
            raise ValueError(
                f"{what} does not go with logs={options.logs}: it takes our own broker"
            )


def explain(side: str = "") -> str:
    """Return the table of the options in Markdown, of one *side* only or of all."""
    lines = ["| option | |", "| --- | --- |"]
    lines += [
        f"| `{option.name}` | {option.help} |"
        for option in _DECLARED
        if not side or option.side == side
    ]
    return "\n".join(lines)


def _meant(given: str, known: Any) -> str:
    lowered = {each.lower(): each for each in known}
    close = difflib.get_close_matches(given.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {lowered[close[0]]}?"
    return f"; there are {', '.join(sorted(lowered.values()))}"
