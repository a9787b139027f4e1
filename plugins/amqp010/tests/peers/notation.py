"""Reads steps, a line of JSON each, performs them, and answers each with a line; for Python 2.7.

A step is ``[name, argument, ...]``, its answer ``{"value": ...}`` or ``{"error": {"name", "code", "message"}}``.
Values that JSON has not are ``{"hex": octets}``, ``{"uuid": text}``, ``{"datetime": seconds}``,
``{"ranges": [[low, high], ...]}`` and ``{"struct": name, "fields": {...}}``.

These programs are written so that Python 3 could read them as well: formatter and linter of the project do. So there is
no ``print``, no ``raise ... from`` and no text with a prefix.
"""

import binascii
import json
import logging
import sys
import traceback
from uuid import UUID

from qpid.datatypes import RangedSet, Serial, timestamp
from qpid.ops import COMPOUND, Compound

logging.basicConfig(stream=sys.stderr, level=logging.ERROR)


def octets(text):
    """Return a value of JSON as octets, where the library takes no others."""
    return text if isinstance(text, bytes) or not hasattr(text, "encode") else text.encode("utf8")


def ranged(pairs):
    found = RangedSet()
    for low, high in pairs:
        found.add(low, high)
    return found


def read(value):
    """Return what a value of JSON stands for."""
    if isinstance(value, list):
        return [read(each) for each in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["hex"]:
        return binascii.unhexlify(value["hex"])
    if list(value) == ["uuid"]:
        return UUID(value["uuid"])
    if list(value) == ["datetime"]:
        return timestamp(value["datetime"])
    if list(value) == ["ranges"]:
        return ranged(value["ranges"])
    if "struct" in value:
        return compound(COMPOUND[value["struct"].replace("-", "_")], value["fields"])
    return {key: read(each) for key, each in value.items()}


def compound(kind, fields):
    """Return a struct, a command or a control with *fields*."""
    types = {each.name: each.type for each in kind.FIELDS}
    found = {}
    for key, value in fields.items():
        key = str(key.replace("-", "_"))
        value = read(value)
        found[key] = octets(value) if types.get(key, "").startswith("vbin") else value
        if types.get(key) == "sequence_no":
            found[key] = Serial(value)
    return kind(**found)


def write(value):
    """Return *value* as JSON can tell it."""
    if isinstance(value, dict):
        return {key: write(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [write(each) for each in value]
    if isinstance(value, UUID):
        return {"uuid": str(value)}
    if isinstance(value, timestamp):
        return {"datetime": float(value)}
    if isinstance(value, Serial):
        return value.value
    if isinstance(value, RangedSet):
        return {"ranges": [[each.lower.value, each.upper.value] for each in value]}
    if isinstance(value, Compound):
        return {"struct": value.NAME.decode("ascii").replace("_", "-"), "fields": fields_of(value)}
    if isinstance(value, bytes):
        return {"hex": binascii.hexlify(value).decode("ascii")}
    return value


def fields_of(value):
    """Return the fields that are present; a bit that is not set is absent."""
    found = {each.name.replace("_", "-"): value[each.name] for each in value.FIELDS}
    return {
        key: write(each) for key, each in found.items() if each is not None and each is not False
    }


def say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(steps):
    """Perform steps until the input ends.

    Args:
        steps: An object whose methods are the steps.
    """
    while True:
        line = sys.stdin.readline()
        if not line:
            return
        step = json.loads(line)
        try:
            answer = {"value": write(getattr(steps, str(step[0]))(*step[1:]))}
        except Exception as error:
            answer = {
                "error": {
                    "name": type(error).__name__,
                    "code": getattr(error, "code", None),
                    "message": str(error),
                    "trace": traceback.format_exc(),
                }
            }
        say(answer)
