"""Names of Kafka's source and sink, and their replacements here: hints for errors."""

from __future__ import annotations

from typing import Final

#: Options of Spark's format ``kafka``, in lower case.
OPTIONS: Final[dict[str, str]] = {
    "kafka.bootstrap.servers": "url, such as amqp://host:5672",
    "subscribe": "address",
    "subscribepattern": "addressPattern, with * and ? instead of a regular expression",
    "assign": "address, and a condition on the column partition",
    "topic": "address",
    "startingoffsetsbytimestamp": "startingTimestamp, one time for all partitions",
    "endingoffsetsbytimestamp": "endingTimestamp, one time for all partitions",
    "startingoffsetsbytimestampstrategy": "startingTimestamp, which continues with later records",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "minoffsetspertrigger": "minMessagesPerTrigger",
    "maxrecordsperpartition": "maxMessagesPerPartition",
    "kafka.group.id": "group",
    "group.id": "group",
    "groupidprefix": "group",
    "includeheaders": "the column application_properties, which is always there",
    "kafkaconsumer.polltimeoutms": "connectTimeout",
    "fetchoffset.numretries": "connectTimeout",
    "fetchoffset.retryintervalms": "connectTimeout",
    "kafka.security.protocol": "url: amqps:// is TLS",
    "kafka.sasl.mechanism": "sasl.mechanism",
    "kafka.sasl.jaas.config": "credentialsFile or credentialsEnv",
    "kafka.ssl.truststore.location": "tls.ca, a PEM file",
    "kafka.ssl.keystore.location": "tls.cert and tls.key, PEM files",
    "kafka.transactional.id": "producer",
    "kafka.enable.idempotence": "delivery=exactly-once",
    "kafka.acks": "nothing: messages count when the broker has accepted them",
    "kafka.client.id": "containerId",
}

#: Columns of Spark's format ``kafka``, in lower case.
COLUMNS: Final[dict[str, str]] = {
    "value": "body",
    "topic": "address when reading, to when writing",
    "headers": "application_properties",
    "timestamptype": "nothing: a log knows one time, enqueued_time",
}


def option_hint(name: str) -> str:
    """Return the replacement of Kafka's option *name* as the end of a sentence; empty if Kafka has no such option."""
    found = OPTIONS.get(name.lower())
    if found is not None:
        return f", which is Kafka's: did you mean {found}?"
    if name.lower().startswith("kafka."):
        return ", which is Kafka's, and nothing takes its place: leave it out"
    return ""


def column_hint(name: str) -> str:
    """Return the replacement of Kafka's column *name* as the end of a sentence; empty if Kafka has no such column."""
    found = COLUMNS.get(name.lower())
    return f", which is Kafka's: did you mean {found}?" if found is not None else ""
