"""Compressed bodies: gzip (RFC 1952) and Zstandard (RFC 8878), named by the content-encoding.

Octets from a peer are decoded in pieces: a small message must not become a large one before its size is known.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

from ..errors import DecodeError, EncodeError
from ..limits import MIB, Limits
from ..message import Message

#: Encodings that ``send(..., compress=)`` takes.
Compression: TypeAlias = Literal["gzip", "zstd"]

#: First octets of every compressed body. Others need not be looked at.
MAGICS: Final = (b"\x1f\x8b", b"\x28\xb5")
#: Octets decoded at a time: at most this much more than the limit is ever in memory.
_PIECE: Final = 256 * 1024
#: Octets to which any message may grow, whatever the ratio: repeated rows are smaller than a hundredth.
_SMALL: Final = 1 * MIB
#: Octets of gzip given to zlib at a time, which copies those that it has not decoded yet.
_GZIP_INPUT: Final = 64 * 1024
#: Window of a frame that every decoder should support (RFC 8878 §3.1.1.1.2).
_ZSTD_WINDOW: Final = 8 * MIB
_GZIP: Final = zlib.MAX_WBITS | 16
_NAMES: Final = {"gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}
_INSTALL: Final = "zstd needs a library: install it with pip install 'amqp-rt[zstd]'"
#: Binary logarithm of the largest window that decoders take on every system.
_WINDOW_LOG_MAX: Final = 30


def compressed(message: Message, encoding: str) -> Message:
    """Return *message* with its data compressed; text becomes data.

    Raises:
        EncodeError: *encoding* is unknown, its library is missing, the body is not data, or it is encoded already.
    """
    if encoding not in ("gzip", "zstd"):
        raise EncodeError(f"compress= is 'gzip' or 'zstd', not {encoding!r:.40}")
    if message.content_encoding is not None:
        raise EncodeError(f"the body is encoded already: {message.content_encoding[:40]!r}")
    body, kind, content_type = message.body, message.body_kind, message.content_type
    if kind == "value" and isinstance(body, str) and content_type is None:
        body, kind, content_type = body.encode(), "data", "text/plain; charset=utf-8"
    if kind != "data":
        raise EncodeError("only data can be compressed: give bytes, text, or a content_type")
    octets = zlib.compress(body, wbits=_GZIP) if encoding == "gzip" else _zstd_compress(body)
    return message.replace(
        body=octets, body_kind="data", content_type=content_type, content_encoding=encoding
    )


def is_known(encoding: str) -> bool:
    """Whether bodies with the content-encoding *encoding* are decoded."""
    return encoding.lower() in _NAMES


def decompressed(octets: bytes, encoding: str, limits: Limits) -> bytes:
    """Decode *octets* of a peer.

    Raises:
        DecodeError: *encoding* is unknown, or *octets* are damaged; or they would grow beyond
            ``decompressed_max`` octets, or ``decompressed_ratio_max`` times their size and 1 MiB
            (``amqp:link:message-size-exceeded``).
    """
    name = _NAMES.get(encoding.lower())
    if name is None:
        raise DecodeError(f"content-encoding {encoding[:40]!r} is not decoded")
    most = min(limits.decompressed_max, max(_SMALL, limits.decompressed_ratio_max * len(octets)))
    found: list[bytes] = []
    size = 0
    for piece in _gzip_pieces(octets) if name == "gzip" else _zstd_pieces(octets, most):
        size += len(piece)
        if size > most:
            raise DecodeError(
                f"the body would be larger than {most} octets: {len(octets)} octets of {name} are"
                " decoded within decompressed_max and decompressed_ratio_max",
                condition="amqp:link:message-size-exceeded",
            )
        found.append(piece)
    return found[0] if len(found) == 1 else b"".join(found)


def _gzip_pieces(octets: bytes) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits=_GZIP)
    at = 0
    try:
        while not decoder.eof and at < len(octets):
            rest = octets[at : at + _GZIP_INPUT]
            at += len(rest)
            while rest:
                yield decoder.decompress(rest, _PIECE)
                rest = decoder.unconsumed_tail
        yield decoder.flush()
    except zlib.error as error:
        raise DecodeError(f"the octets are no gzip: {error}") from None
    if not decoder.eof:
        raise DecodeError("the octets of gzip end too early")
    # One member only: each would cost a decoder of its own.
    if decoder.unused_data or at < len(octets):
        raise DecodeError("octets follow the end of gzip")


def _zstd() -> Any:
    """Return the module for Zstandard: that of Python 3.14, or its backport, which has the same interface.

    Raises:
        ImportError: There is none.
    """
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _zstd_compress(octets: bytes) -> bytes:
    try:
        zstd = _zstd()
    except ImportError:
        raise EncodeError(_INSTALL) from None
    found: bytes = zstd.compress(octets)
    return found


def _zstd_pieces(octets: bytes, most: int) -> Iterator[bytes]:
    try:
        zstd = _zstd()
    except ImportError:
        raise DecodeError(_INSTALL, condition="amqp:not-implemented") from None
    # Of this size the decoder allocates what the frame announces, before any octet is decoded.
    window = max(most, _ZSTD_WINDOW)
    log = min(window.bit_length() - 1, _WINDOW_LOG_MAX)
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: log})
    rest = octets
    try:
        while not decoder.eof:
            yield decoder.decompress(rest, _PIECE)
            rest = b""
            if decoder.needs_input:
                break
    except zstd.ZstdError as error:
        raise DecodeError(f"the octets are no zstd: {error}") from None
    if not decoder.eof:
        raise DecodeError("the octets of zstd end too early")
    if decoder.unused_data:
        raise DecodeError("octets follow the end of zstd")
