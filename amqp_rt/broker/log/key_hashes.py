"""Hashes of partition keys: which partition of a log a key belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from struct import Struct
from typing import Final
from zlib import crc32

_BLOCK: Final = Struct("<3I")
_32: Final = 0xFFFFFFFF

#: Octets of a key that lookup3 hashes, since it takes about a microsecond for three of them, and the key is
#: the peer's. Longer keys have the hash of their checksum.
LOOKUP3_KEY_MAX: Final = 256
#: Hashes of recent keys that are remembered.
_REMEMBERED: Final = 1_024


def _turned(value: int, by: int) -> int:
    return (value << by | value >> 32 - by) & _32


@lru_cache(_REMEMBERED)
def lookup3(key: bytes) -> int:
    """Return Jenkins' lookup3 (hashlittle2, both words combined) of *key* as clients of Event Hubs use it.

    The result is the absolute value of the lower 16 bits as a signed number; 0 for an empty key.
    """
    if not key:
        return 0
    if len(key) > LOOKUP3_KEY_MAX:
        key = b"%d" % crc32(key)
    a = b = c = 0xDEADBEEF + len(key) & _32
    last = (len(key) - 1) // 12 * 12
    for at in range(0, last, 12):
        first, second, third = _BLOCK.unpack_from(key, at)
        a, b, c = _mixed(a + first & _32, b + second & _32, c + third & _32)
    # Zeros after the end change nothing.
    first, second, third = _BLOCK.unpack(key[last:].ljust(12, b"\0"))
    a, b, c = a + first & _32, b + second & _32, c + third & _32
    for by_b, by_c, by_a in ((14, 11, 25), (16, 4, 14)):
        c = (c ^ b) - _turned(b, by_b) & _32
        a = (a ^ c) - _turned(c, by_c) & _32
        b = (b ^ a) - _turned(a, by_a) & _32
    c = (c ^ b) - _turned(b, 24) & _32
    low: int = (b ^ c) & 0xFFFF
    return low if low < 0x8000 else 0x10000 - low


def _mixed(a: int, b: int, c: int) -> tuple[int, int, int]:
    """Return the state of lookup3 after a block."""
    for by_c, by_a, by_b in ((4, 6, 8), (16, 19, 4)):
        a = (a - c & _32) ^ _turned(c, by_c)
        c = c + b & _32
        b = (b - a & _32) ^ _turned(a, by_a)
        a = a + c & _32
        c = (c - b & _32) ^ _turned(b, by_b)
        b = b + a & _32
    return a, b, c


#: Name → hash, a number that is at least 0; its remainder is the partition.
KEY_HASHES: Final[Mapping[str, Callable[[bytes], int]]] = {"crc32": crc32, "lookup3": lookup3}
