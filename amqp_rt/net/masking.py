"""Masks of WebSockets (RFC 6455 §5.3): octets combined with four octets, over and over.

The function is in C where that was compiled, and here in Python otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

#: For each octet of a mask, the values of all octets combined with it.
_TABLES: Final = [bytes(each ^ octet for each in range(256)) for octet in range(256)]


def mask_in_python(
    data: bytes | memoryview, start: int, stop: int, key: bytes, phase: int, /
) -> bytes:
    """Return octets *start* to *stop* of *data* combined with the mask *key*.

    The first of them is combined with octet *phase* of *key*, modulo 4. Of the ways that Python
    has, one pass for each octet of the mask is the fastest from 64 octets on: XOR of large numbers
    is fast, but octets are slow to become numbers.
    """
    found = bytearray(memoryview(data)[start:stop])
    for at in range(4):
        found[at::4] = found[at::4].translate(_TABLES[key[(phase + at) & 3]])
    return bytes(found)


if TYPE_CHECKING:
    apply_mask = mask_in_python
else:
    try:
        from ._masking import apply_mask
    except ImportError:
        apply_mask = mask_in_python
