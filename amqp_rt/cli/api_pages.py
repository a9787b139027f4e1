"""AsyncAPI documents of containers as pages for people: one HTML file without scripts or other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

#: Whole page. It may be opened from a disk, and loads nothing.
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ margin: 2rem auto; max-width: 56rem; padding: 0 1rem }}
section {{ border-top: 1px solid #8886; margin-top: 1.5rem }}
code, pre {{ font-family: ui-monospace, monospace }}
pre {{ background: #8881; overflow-x: auto; padding: .75rem }}
dt {{ font-weight: 600 }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Version {version}, AsyncAPI {standard}</p>
<nav><ul>
{index}
</ul></nav>
{operations}
</body>
</html>
"""


def html_page(document: Mapping[str, Any]) -> str:
    """Return *document*, as :meth:`Container.asyncapi` makes it, as an HTML page.

    All texts are escaped: those of documentation and addresses are shown as they were written.
    """
    info = document["info"]
    operations = document["operations"]
    index = [
        f'<li><a href="#{escape(name)}">{escape(_address(document, each))}</a></li>'
        for name, each in operations.items()
    ]
    return _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        standard=escape(document["asyncapi"]),
        index="\n".join(index),
        operations="\n".join(_operation(document, name, each) for name, each in operations.items()),
    )


def _operation(document: Mapping[str, Any], name: str, operation: Mapping[str, Any]) -> str:
    """Return the section of one handler."""
    does = {
        "receive": "The application receives messages at this address.",
        "send": "The application sends messages to receivers at this address.",
    }[operation["action"]]
    if "reply" in operation:
        streamed = operation["reply"].get("x-streamed", False)
        does = "The application answers requests at this address" + (
            ", by a stream of replies." if streamed else "."
        )
    address = _address(document, operation)
    parts = [f'<section id="{escape(name)}">', f"<h2><code>{escape(address)}</code></h2>"]
    if summary := operation.get("summary"):
        parts.append(f"<p>{escape(summary)}</p>")
    parts.append(f"<p>{does}</p>\n<dl>")
    parts += _payload(document, "Message", operation["messages"])
    if "reply" in operation:
        parts += _payload(document, "Reply", operation["reply"]["messages"])
    return "\n".join([*parts, "</dl>", "</section>"])


def _payload(
    document: Mapping[str, Any], what: str, references: list[Mapping[str, str]]
) -> list[str]:
    found = []
    for each in references:
        message = _resolve(document, _resolve(document, each))
        schema = message.get("payload")
        text = "any body" if schema is None else json.dumps(_whole(document, schema), indent=2)
        found.append(f"<dt>{what}</dt>\n<dd><pre>{escape(text)}</pre></dd>")
    return found


def _address(document: Mapping[str, Any], operation: Mapping[str, Any]) -> str:
    address: str = _resolve(document, operation["channel"])["address"]
    return address


def _resolve(document: Mapping[str, Any], reference: Mapping[str, Any]) -> Any:
    """Return what ``$ref`` of *reference* points to in *document*."""
    found: Any = document
    for part in reference["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return found


def _whole(document: Mapping[str, Any], schema: Any) -> Any:
    """Return *schema* with the schemas that it refers to directly; deeper ones by their name."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return schema
    return _resolve(document, schema)
