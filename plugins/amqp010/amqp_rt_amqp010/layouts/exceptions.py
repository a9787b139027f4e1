"""Exceptions that the specification declares for commands and their fields."""

from __future__ import annotations

from typing import Final

from .codes import ErrorCode

#: Command → its exceptions: field (empty: the command itself), name, error code.
EXCEPTIONS: Final[dict[str, tuple[tuple[str, str, ErrorCode], ...]]] = {
    "message.transfer": (("destination", "nonexistent-exchange", ErrorCode.NOT_FOUND),),
    "message.resume": (("destination", "destination-not-found", ErrorCode.NOT_FOUND),),
    "message.subscribe": (
        ("", "queue-deletion", ErrorCode.RESOURCE_DELETED),
        ("", "queue-not-found", ErrorCode.NOT_FOUND),
        ("destination", "unique-subscriber-destination", ErrorCode.NOT_ALLOWED),
        ("exclusive", "in-use", ErrorCode.RESOURCE_LOCKED),
    ),
    "message.cancel": (("destination", "subscription-not-found", ErrorCode.NOT_FOUND),),
    "tx.select": (
        ("", "exactly-once", ErrorCode.ILLEGAL_STATE),
        ("", "no-dtx", ErrorCode.ILLEGAL_STATE),
        ("", "explicit-accepts", ErrorCode.NOT_ALLOWED),
    ),
    "tx.commit": (("", "select-required", ErrorCode.ILLEGAL_STATE),),
    "tx.rollback": (("", "select-required", ErrorCode.ILLEGAL_STATE),),
    "dtx.start": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("", "already-known", ErrorCode.NOT_ALLOWED),
        ("", "join-and-resume", ErrorCode.NOT_ALLOWED),
        ("xid", "unknown-xid", ErrorCode.NOT_ALLOWED),
        ("join", "unsupported", ErrorCode.NOT_IMPLEMENTED),
    ),
    "dtx.end": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("", "suspend-and-fail", ErrorCode.NOT_ALLOWED),
        ("xid", "not-associated", ErrorCode.ILLEGAL_STATE),
    ),
    "dtx.commit": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("xid", "unknown-xid", ErrorCode.NOT_FOUND),
        ("xid", "not-disassociated", ErrorCode.ILLEGAL_STATE),
        ("one-phase", "one-phase", ErrorCode.ILLEGAL_STATE),
        ("one-phase", "two-phase", ErrorCode.ILLEGAL_STATE),
    ),
    "dtx.forget": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("xid", "unknown-xid", ErrorCode.NOT_FOUND),
        ("xid", "not-disassociated", ErrorCode.ILLEGAL_STATE),
    ),
    "dtx.get-timeout": (("xid", "unknown-xid", ErrorCode.NOT_FOUND),),
    "dtx.prepare": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("xid", "unknown-xid", ErrorCode.NOT_FOUND),
        ("xid", "not-disassociated", ErrorCode.ILLEGAL_STATE),
    ),
    "dtx.rollback": (
        ("", "illegal-state", ErrorCode.ILLEGAL_STATE),
        ("xid", "unknown-xid", ErrorCode.NOT_FOUND),
        ("xid", "not-disassociated", ErrorCode.ILLEGAL_STATE),
    ),
    "dtx.set-timeout": (("xid", "unknown-xid", ErrorCode.NOT_FOUND),),
    "exchange.declare": (
        ("exchange", "reserved-names", ErrorCode.NOT_ALLOWED),
        ("exchange", "exchange-name-required", ErrorCode.INVALID_ARGUMENT),
        ("type", "typed", ErrorCode.NOT_ALLOWED),
        ("type", "exchange-type-not-found", ErrorCode.NOT_FOUND),
        ("alternate-exchange", "pre-existing-exchange", ErrorCode.NOT_ALLOWED),
        ("passive", "not-found", ErrorCode.NOT_FOUND),
        ("arguments", "unknown-argument", ErrorCode.NOT_IMPLEMENTED),
    ),
    "exchange.delete": (
        ("exchange", "exists", ErrorCode.NOT_FOUND),
        ("exchange", "exchange-name-required", ErrorCode.INVALID_ARGUMENT),
        ("exchange", "used-as-alternate", ErrorCode.NOT_ALLOWED),
        ("if-unused", "exchange-in-use", ErrorCode.PRECONDITION_FAILED),
    ),
    "exchange.bind": (
        ("queue", "empty-queue", ErrorCode.INVALID_ARGUMENT),
        ("queue", "queue-existence", ErrorCode.NOT_FOUND),
        ("exchange", "exchange-existence", ErrorCode.NOT_FOUND),
        ("exchange", "exchange-name-required", ErrorCode.INVALID_ARGUMENT),
        ("arguments", "unknown-argument", ErrorCode.NOT_IMPLEMENTED),
    ),
    "exchange.unbind": (
        ("queue", "non-existent-queue", ErrorCode.NOT_FOUND),
        ("exchange", "non-existent-exchange", ErrorCode.NOT_FOUND),
        ("exchange", "exchange-name-required", ErrorCode.INVALID_ARGUMENT),
        ("binding-key", "non-existent-binding-key", ErrorCode.NOT_FOUND),
    ),
    "queue.declare": (
        ("queue", "reserved-prefix", ErrorCode.NOT_ALLOWED),
        ("alternate-exchange", "pre-existing-exchange", ErrorCode.NOT_ALLOWED),
        ("alternate-exchange", "unknown-exchange", ErrorCode.NOT_FOUND),
        ("passive", "passive", ErrorCode.NOT_FOUND),
        ("exclusive", "in-use", ErrorCode.RESOURCE_LOCKED),
        ("arguments", "unknown-argument", ErrorCode.NOT_IMPLEMENTED),
    ),
    "queue.delete": (
        ("queue", "empty-name", ErrorCode.INVALID_ARGUMENT),
        ("queue", "queue-exists", ErrorCode.NOT_FOUND),
        ("if-unused", "if-unused-flag", ErrorCode.PRECONDITION_FAILED),
        ("if-empty", "not-empty", ErrorCode.PRECONDITION_FAILED),
    ),
    "queue.purge": (
        ("queue", "empty-name", ErrorCode.INVALID_ARGUMENT),
        ("queue", "queue-exists", ErrorCode.NOT_FOUND),
    ),
    "file.consume": (
        ("queue", "queue-exists-if-empty", ErrorCode.NOT_ALLOWED),
        ("consumer-tag", "not-existing-consumer", ErrorCode.NOT_ALLOWED),
        ("consumer-tag", "not-empty-consumer-tag", ErrorCode.NOT_ALLOWED),
        ("exclusive", "in-use", ErrorCode.RESOURCE_LOCKED),
    ),
    "file.publish": (("exchange", "refusal", ErrorCode.NOT_IMPLEMENTED),),
    "stream.consume": (
        ("queue", "queue-exists-if-empty", ErrorCode.NOT_ALLOWED),
        ("consumer-tag", "not-existing-consumer", ErrorCode.NOT_ALLOWED),
        ("consumer-tag", "not-empty-consumer-tag", ErrorCode.NOT_ALLOWED),
        ("exclusive", "in-use", ErrorCode.RESOURCE_LOCKED),
    ),
    "stream.publish": (("exchange", "refusal", ErrorCode.NOT_IMPLEMENTED),),
}
