"""Loss of messages: the error that ends a query, unless ``failOnDataLoss`` permits the loss.

Losses of the broker, which end no query, are in :mod:`.losses`.
"""

from __future__ import annotations

import logging

from amqp_rt.errors import AmqpError

from .options import Options

_log = logging.getLogger("amqp_rt_spark")


class DataLost(AmqpError):
    """Messages to read are gone."""

    default_condition = "amqp:not-found"


def describe_loss(node: str, first: int, end: int) -> str:
    """Return the error text for lost records."""
    return (
        f"{node}: the records from {first} to {end - 1} are gone, since retention was faster; "
        "failOnDataLoss=false goes on without them"
    )


def note_loss(options: Options, text: str) -> None:
    """Log that messages are lost, as *text* says.

    Raises:
        DataLost: ``failOnDataLoss`` is set.
    """
    if options.fail_on_data_loss:
        raise DataLost(text)
    _log.warning("%s", text)
