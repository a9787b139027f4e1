"""URLs of stores: ``postgresql://USER@HOST/DATABASE?schema=NAME``, as libpq reads them, with options of the store."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from amqp_rt.errors import AmqpError

#: Options of libpq by which a silent server is noticed, unless the URL has its own. Without an answer to data
#: for ``tcp_user_timeout`` milliseconds, or to four probes a second apart, the connection is dead.
_DEFAULTS: Final = {
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "4",
    "tcp_user_timeout": "6000",
    # Of several hosts, the one that takes changes.
    "target_session_attrs": "read-write",
}
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")


class StoreUrl(Struct, frozen=True):
    """Where a store is, and how long its broker waits for it."""

    #: Parameters of libpq, which may include a password.
    conninfo: str
    #: Name for logs and errors, without secrets.
    name: str
    #: Schema of the tables.
    schema: str
    #: Seconds without an answer of the database after which it is taken to be lost, and without a sign of the
    #: active broker after which another one takes over.
    silent_s: float
    #: Seconds since the last answer of the database within which the broker that uses it tries to continue.
    rejoin_s: float

    def __repr__(self) -> str:
        return f"<StoreUrl {self.name}>"


def parse_store_url(text: str) -> StoreUrl:
    """Return the parts of a URL; no password appears in an error.

    Raises:
        AmqpError: *text* is no such URL, or an option has no valid value.
    """
    try:
        url = urlsplit(text)
        options = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
        given = dict(options)
        ours = {key: given.pop(key, "") for key in ("schema", "silent_s", "rejoin_s")}
        query = urlencode(given, quote_via=quote)
        found = conninfo_to_dict(url._replace(query=query).geturl())
        known = {key: str(value) for key, value in found.items() if value is not None}
        hosts = (known.get("host") or known.get("hostaddr") or "localhost").split(",")
        ports = (known.get("port") or "").split(",")
        database = known.get("dbname") or ""
        # A password with unescaped characters ends up in other parts.
        wrong = (
            "@" in database
            or "/" in database
            or not all(each.isdecimal() for each in ports if each)
        )
    except (ValueError, psycopg.Error):
        wrong = True
    if wrong:
        # libpq's own text may quote a part of the password.
        raise _invalid(
            "the URL of a store is postgresql://USER:PASSWORD@HOST:PORT/DATABASE?schema=NAME, with options of libpq "
            "after the question mark; / ? # @ : and % of a password are written as %2F %3F %23 %40 %3A and %25"
        )
    schema = ours["schema"] or "amqp_rt"
    if not _SCHEMA.fullmatch(schema):
        raise _invalid(
            f"schema={schema!r:.60}: the name of a schema has small letters, digits and _, at most 48"
        )
    silent_s = _seconds("silent_s", ours["silent_s"], 6.0, 1.0)
    rejoin_s = _seconds("rejoin_s", ours["rejoin_s"], 10.0, 0.0)
    if len(ports) == 1:
        ports *= len(hosts)
    place = ",".join(
        f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False)
    )
    user = f"{known['user']}@" if known.get("user") else ""
    name = f"postgresql://{user}{place}/{database}?schema={schema}"
    # Of a database in SQL_ASCII, text would be octets otherwise.
    conninfo = make_conninfo("", **{**_DEFAULTS, **known, "client_encoding": "UTF8"})
    return StoreUrl(conninfo, name, schema, silent_s, rejoin_s)


def _seconds(key: str, text: str, default: float, least: float) -> float:
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= 3_600:
        raise _invalid(f"{key}={text!r:.60}: a number of seconds from {least:g} to 3600")
    return value


def _invalid(text: str) -> AmqpError:
    return AmqpError(text, condition="amqp:invalid-field")
