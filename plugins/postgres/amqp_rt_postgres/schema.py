"""Tables of a store, and how they are created.

The messages and chunks of a node are in its *room*, a number. At first that is the number of the node. A node that is
cleared gets another room, so that clearing takes no longer for many messages than for one; the old room is emptied
step by step.

A message has its payload in its row, or in a *body*: in pieces, or as the only piece that several messages share.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import sql

from amqp_rt.errors import AmqpError
from amqp_rt.stores.base import NODE_MAX, StoreFailed

#: Version of the tables.
VERSION: Final = 2
#: First number of a room that is not the number of a node.
FIRST_ROOM: Final = NODE_MAX + 1
#: Room of messages on their way to another place, within a transaction.
MOVING: Final = -1
#: SQLSTATE of a batch whose epoch is over.
FENCED: Final = "AR001"

#: Tables with many rows that come and go: their space is reused soon. Payloads are not compressed.
_TABLES: Final = f"""
CREATE TABLE state (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    batch bigint NOT NULL DEFAULT 0,
    clean boolean NOT NULL DEFAULT true
) WITH (fillfactor = 10);
INSERT INTO state (version) VALUES ({VERSION});

CREATE TABLE message (
    room bigint, sequence bigint,
    pieces integer NOT NULL, size bigint NOT NULL, spilled boolean NOT NULL,
    head bytea NOT NULL, payload bytea NOT NULL,
    PRIMARY KEY (room, sequence)
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE message ALTER head SET STORAGE EXTERNAL, ALTER payload SET STORAGE EXTERNAL;
CREATE INDEX message_spilled ON message (room) WHERE spilled;

CREATE TABLE body (
    room bigint, sequence bigint, body bigint NOT NULL,
    PRIMARY KEY (room, sequence)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX body_body ON body (body);

CREATE TABLE piece (
    body bigint, index integer, data bytea NOT NULL,
    PRIMARY KEY (body, index)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
ALTER TABLE piece ALTER data SET STORAGE EXTERNAL;

CREATE TABLE chunk (
    room bigint, first_offset bigint,
    count bigint NOT NULL, first_ms bigint NOT NULL, last_ms bigint NOT NULL, latest_ms bigint NOT NULL,
    size bigint NOT NULL, before bigint NOT NULL, data bytea NOT NULL,
    PRIMARY KEY (room, first_offset)
);
ALTER TABLE chunk ALTER data SET STORAGE EXTERNAL;
CREATE INDEX chunk_time ON chunk (room, latest_ms);

CREATE TABLE extent (
    log bigint PRIMARY KEY,
    first bigint NOT NULL, next bigint NOT NULL, latest_ms bigint NOT NULL,
    written bigint NOT NULL, dropped bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE fact (
    kind bytea, digest bytea, key bytea NOT NULL, value bytea NOT NULL,
    PRIMARY KEY (kind, digest)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE room (node bigint PRIMARY KEY, room bigint NOT NULL);
CREATE TABLE cleared (room bigint PRIMARY KEY, node bigint NOT NULL);
CREATE TABLE dead_body (body bigint PRIMARY KEY);

CREATE FUNCTION begin_batch(expected bigint, expected_token bigint, number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE state SET batch = number WHERE epoch = expected AND token = expected_token;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % is over', expected USING ERRCODE = '{FENCED}';
    END IF;
END $$;
"""

_PRESENT: Final = "SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relname = ANY($2)"
#: Rights on our tables that the user does not have.
_MISSING: Final = """
SELECT p || ' on ' || c.relname FROM pg_class c, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p
WHERE c.relnamespace = to_regnamespace($1) AND c.relname = ANY($2) AND NOT has_table_privilege(c.oid, p) LIMIT 1
"""


def prepare_schema(connection: psycopg.Connection, name: str) -> None:
    """Create the tables in the schema *name* unless they exist, and use them on this connection.

    Raises:
        AmqpError: They were created by another release, or the schema has other tables.
        StoreFailed: The user may not use them.
    """
    identifier = sql.Identifier(name)
    connection.execute(sql.SQL("SET search_path TO {}").format(identifier))
    tables = re.findall(r"CREATE TABLE (\w+)", _TABLES)
    with connection.transaction():
        # One of several brokers that start at once creates the tables.
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext('amqp_rt'), hashtext($1))", (name,)
        )
        found = {row[0] for row in connection.execute(_PRESENT, (name, tables))}
        if not found:
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(identifier))
            connection.execute(_TABLES.encode())
        elif lacking := sorted(set(tables) - found):
            raise _foreign(name, f"has a table {min(found)!r}, and none {lacking[0]!r}")
    missing = connection.execute(_MISSING, (name, tables)).fetchone()
    if missing is not None:
        raise StoreFailed(
            f"the user {connection.info.user!r} needs SELECT, INSERT, UPDATE and DELETE on all tables of the schema {name!r}, "
            f"and has no {missing[0]}"
        )
    row = connection.execute("SELECT version FROM state").fetchone()
    if row is None:
        raise _foreign(name, "has an empty table 'state'")
    if row[0] != VERSION:
        raise AmqpError(
            f"the schema {name!r} was written by another release: version {row[0]} of its tables, and this release "
            f"knows {VERSION}",
            condition="amqp:not-allowed",
        )


def _foreign(name: str, why: str) -> AmqpError:
    return AmqpError(
        f"the schema {name!r} {why}, so that it is not that of a store, or not whole: give another one with ?schema=NAME",
        condition="amqp:not-allowed",
    )
