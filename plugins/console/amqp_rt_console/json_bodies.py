"""Check bodies that are declared to be JSON, before they are published."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from .problems import Problem

#: Reads the syntax only, which takes less time than to make objects of it.
_SYNTAX: Final = msgspec.json.Decoder(msgspec.Raw)
_BYTE: Final = re.compile(r" \(byte (\d+)\)")
#: Octets of a body in which the exact place of a mistake is looked for: that is one step of the event loop.
_EXACT_MAX: Final = 64 * 1024


class _NoConstant(Exception):
    """Constant that is none of JSON, such as NaN."""


def _refuse_constant(name: str) -> Any:
    raise _NoConstant(f"{name} is no value of JSON")


#: Names the place of a mistake more exactly than the other decoder, with line and column.
_EXACT: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def is_json(content_type: str | None) -> bool:
    """Return whether *content_type* declares JSON: ``application/json``, or a type with ``+json`` (RFC 6839 §3.1)."""
    if content_type is None:
        return False
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def check_json(octets: bytes, content_type: str) -> None:
    """Check that *octets* are JSON in UTF-8 (RFC 8259 §8.1), as their *content_type* declares.

    Raises:
        Problem: They are not; the sentence has the mistake, its line and its column.
    """
    try:
        # The other decoder does not look at the octets within texts.
        text = octets.decode()
        try:
            _SYNTAX.decode(octets)
        except msgspec.DecodeError as error:
            said, found = str(error), _BYTE.search(str(error))
            before = octets[: int(found[1])].decode(errors="ignore") if found else text
            if len(octets) > _EXACT_MAX:
                mistake = _BYTE.sub("", said.removeprefix("JSON is malformed: "))
                raise _refusal(content_type, mistake, before) from None
            try:
                _EXACT.decode(text)
            except _NoConstant as constant:
                # This decoder passes no place with a constant.
                raise _refusal(content_type, str(constant), before) from None
    except UnicodeDecodeError as error:
        before = octets[: error.start].decode()
        raise _refusal(content_type, f"{error.reason} of UTF-8", before) from None
    except json.JSONDecodeError as error:
        mistake = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise _refusal(content_type, mistake, text[: error.pos]) from None
    except RecursionError:
        raise Problem(
            400, f"the body is declared as {content_type:.100}, but is nested too deeply"
        ) from None


def _refusal(content_type: str, mistake: str, before: str) -> Problem:
    """Return the refusal of a body with a *mistake* after the text *before*."""
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    return Problem(
        400,
        f"the body is declared as {content_type:.100}, but is not JSON:"
        f" {mistake} at line {line:,}, column {column:,}",
    )
