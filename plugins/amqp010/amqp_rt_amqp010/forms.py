"""Which fields of a header segment were absent: a number kept in an annotation of the message.

A message comes out with the fields that it came with, absent ones included. 0 is the form of most messages,
and of all that came by other protocols.
"""

from __future__ import annotations

from typing import Final

#: There are no message-properties.
NO_PROPERTIES: Final = 1
#: The message-properties come before the delivery-properties.
PROPERTIES_FIRST: Final = 2
#: Flags of the delivery-properties.
DISCARD_UNROUTABLE: Final = 4
IMMEDIATE: Final = 8
#: Fields that are absent.
NO_ROUTING_KEY: Final = 16
NO_CONTENT_LENGTH: Final = 32
NO_REPLY_EXCHANGE: Final = 64
NO_REPLY_KEY: Final = 128
