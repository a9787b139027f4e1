"""Write docs/security-matrix.md from the tables that tests/security/test_security_matrix.py proves.

``python docs/_tools/security_matrix.py`` writes the page; a test fails if it is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "security-matrix.md"
sys.path.insert(0, str(ROOT / "tests"))

import security_matrix as matrix  # noqa: E402

HEAD = """\
# Security matrix

Who gets in, and what they may do then. Every cell is a test against a live broker
(`tests/security/test_security_matrix.py`); `python docs/_tools/security_matrix.py` writes this page from the same
tables. {doc}`guides/security` and {doc}`guides/access` say how to set it up.
"""
LOGINS = """\

## Logins

A client on another machine, over each transport, where the SASL layer is required, optional or off
(`sasl_policy`), with good credentials and others. All mechanisms are offered that may be. `—`: the mechanism knows
no such thing.

"""
RIGHTS = """\

## Rights

What a user may do who has a right at the node `q`, *elsewhere* only, or *nothing* at all; whether the right
comes from a rule or from a token, and on every transport. Otherwise the error is the one in the cell. AMQP 0-9-1 and
0-10 are carried by TCP and TLS, and have no tokens. A client of 0-10 with *nothing* is refused when it opens the virtual
host.
"""
NAMESPACES = """\

## Namespaces of Service Bus

What a client may do in a namespace whose token is signed with a key for the entity `q`, whether the key belongs to the
namespace or to the entity (`plugins/servicebus/tests/test_rights_of_namespaces.py`). Names are those of operations at
`$management`; a status is that of the answer. Only a key of the namespace lists its queues.
"""
RABBITMQ = """\

## Listeners for RabbitMQ's clients

What a client may do at a listener with the profile `rabbitmq` who has a right at the queue `q`, whether the right comes from
a rule or from the token in its password (`plugins/rabbitmq/tests/test_rights_of_rabbitmq.py`). A number is the status of
the answer.
"""
HTTP = """\

## The HTTP door

What a user may do over HTTP who has a right at the queue `q` (`plugins/console/tests/test_http_rights.py`). Paths are those
below `/api/v1`; a number is the status of the answer. `GET /nodes` lists the nodes that the user may manage.
"""
MESH = """\

## Meshes

What a container may do whose login has a right at `$mesh`, *elsewhere* only, or *nothing* at all
(`tests/security/test_rights_in_a_mesh.py`). Who has not joined stays an ordinary client. Offers that are *dropped* are counted.
Members on other machines need TLS as well (`tests/abuse/test_doors.py`).
"""
EDGES = """\

What an edge may do, which may send to `$mesh`, by its right at `q`; the uplink judges it as a client.
"""
EDGE_PROCESSES = """\

## Edge processes

Attempts at a broker with `amqp-rt serve --edges` (`tests/security/test_edge_identities.py`). Logins and rights over
edges are those of the tables above, as the broker judges them.

"""
PASSAGES = """\

## Where messages may be let go

What a user may declare who manages the queue `mine` and the exchange `mine`, by the right at the queue `q` and the
exchange `q`; whether the rights come from rules or from tokens.
"""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(*head: str) -> list[str]:
    return [row(*head), row(*("---" for _ in head))]


def logins() -> list[str]:
    lines = [f"- {names}: {meaning}." for names, meaning in matrix.MEANINGS.items()]
    for mechanism in matrix.LOGINS:
        title = "Without the SASL layer" if mechanism == "none" else mechanism
        lines += ["", f"### {title}", "", *table("transport", "SASL", *matrix.CREDENTIALS)]
        # Transports and modes with the same answers share a line.
        known: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for transport in matrix.TRANSPORTS:
            for mode in matrix.MODES:
                found = tuple(
                    matrix.outcome_of_login(mechanism, transport, mode, each) or "—"
                    for each in matrix.CREDENTIALS
                )
                known.setdefault(found, {}).setdefault(mode, []).append(transport)
        for found, modes in known.items():
            by_transports: dict[tuple[str, ...], list[str]] = {}
            for mode, transports in modes.items():
                by_transports.setdefault(tuple(transports), []).append(mode)
            for at, said in by_transports.items():
                lines.append(row(", ".join(at), ", ".join(said), *found))
    return lines


def rights(protocols: dict[str, dict[str, dict[str, str]]], columns: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for protocol, operations in protocols.items():
        lines += ["", f"### {protocol}", "", *table("operation", *columns)]
        for operation, by_right in operations.items():
            cells = (by_right[right] for right in columns)
            lines.append(row(operation, *(c if c == matrix.ALLOWED else f"`{c}`" for c in cells)))
    return lines


def page() -> str:
    sections = {
        HEAD + LOGINS: logins(),
        RIGHTS: rights(matrix.RIGHTS_OF, matrix.RIGHTS),
        NAMESPACES: rights({"Service Bus": matrix.RIGHTS_IN_NAMESPACES}, matrix.RIGHTS),
        RABBITMQ: rights({"RabbitMQ 4": matrix.RIGHTS_AT_RABBITMQ}, matrix.RIGHTS),
        HTTP: rights({"JSON API": matrix.RIGHTS_OVER_HTTP}, matrix.RIGHTS),
        MESH: rights({"Members": matrix.RIGHTS_AT_MESH}, matrix.RIGHTS),
        EDGES: rights({"Edges": matrix.RIGHTS_OF_EDGES}, matrix.RIGHTS),
        EDGE_PROCESSES: [
            *table("attempt", "outcome"),
            *(row(attempt, outcome) for attempt, outcome in matrix.AT_EDGES.items()),
        ],
        PASSAGES: rights(matrix.PASSAGES_OF, matrix.RIGHTS_THERE),
    }
    return "".join(head + "\n".join(lines) + "\n" for head, lines in sections.items())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
