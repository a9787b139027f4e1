"""Write docs/limits.md from the fields of ``amqp_rt.limits.Limits`` and the comments above them.

``python docs/_tools/limits_page.py`` writes the page; a test fails if it is not up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

from amqp_rt_servicebus.bounds import Bounds
from msgspec import Struct
from msgspec.structs import fields

from amqp_rt.limits import KIB, MIB, Limits

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "limits.md"
SOURCE = ROOT / "amqp_rt" / "limits.py"
#: Limits of a namespace of Service Bus, which has a file and a class of its own.
BOUNDS = ROOT / "plugins" / "servicebus" / "amqp_rt_servicebus" / "bounds.py"

HEAD = """\
# Limits

All limits of a broker, with their defaults: fields of {class}`~amqp_rt.limits.Limits` in a program, and with
`amqp-rt serve` options or a table of the file of `--config`:

```text
amqp-rt serve --limit idle_timeout_s=30 --limit message_size_max=64MiB
```

```toml
[limits]
idle_timeout_s = 30
message_size_max = "64MiB"
```

`amqp-rt limits` lists them. The command line goes before the file. Names that end in `_s` are seconds; whole numbers may be followed by `KiB`,
`MiB` or `GiB`. A name that is unknown, a value of another type, NaN, or one that is out of range ends the start with
one sentence that says so. `python docs/_tools/limits_page.py` writes this page from `amqp_rt/limits.py`.

| limit | default | what it bounds |
| --- | --- | --- |
"""


BOUNDS_HEAD = """
## Namespaces of Service Bus

Limits of a namespace of [Service Bus](guides/servicebus.md): fields of `amqp_rt_servicebus.bounds.Bounds`, for
`Namespace(bounds=…)` in a program, `@pytest.mark.servicebus(bounds=…)` in a test, and `--limit NAME=VALUE` of
`amqp-rt servicebus`, which takes those above too. What is beyond them gets the answer that the service gives. With
`realistic`, those of the service are the defaults where they are stricter.

| limit | default | what it bounds |
| --- | --- | --- |
"""


def meanings(source: Path = SOURCE, kind: str = "Limits") -> dict[str, tuple[str, bool]]:
    """Return the comment above each field, and whether its default is in units of bytes.

    Fields without a comment in between share one.
    """
    found: dict[str, tuple[str, bool]] = {}
    comment: list[str] = []
    inside = False
    new = True
    for line in source.read_text("utf-8").splitlines():
        if line.startswith("class "):
            inside = line.startswith(f"class {kind}(")
        elif inside and line.startswith("    #:"):
            comment = (
                [line.removeprefix("    #:").strip()] if new else [*comment, line.strip(" #:")]
            )
            new = False
        elif inside and (field := re.match(r"    (\w+): (int|float) = ", line)):
            found[field[1]] = " ".join(comment).replace("``", "`"), "KIB" in line or "MIB" in line
            new = True
    return found


def shown(value: float, in_bytes: bool) -> str:
    for unit, name in ((1024 * MIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if in_bytes and value >= unit and value % unit == 0:
            return f"{int(value) // unit} {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def rows(kind: type[Struct], known: dict[str, tuple[str, bool]]) -> str:
    return "".join(
        f"| `{field.name}` | {shown(field.default, known[field.name][1])} | {known[field.name][0]} |\n"
        for field in fields(kind)
    )


def page() -> str:
    bounds = meanings(BOUNDS, "Bounds")
    return HEAD + rows(Limits, meanings()) + BOUNDS_HEAD + rows(Bounds, bounds)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
