"""Declarations of jobs: one Struct each, which the command line, a TOML file and notebooks share.

A field is an option: ``max_messages`` is ``--max-messages`` on the command line and ``max_messages = 100``
in the file; its description is the help. Structs made in a notebook are checked in the same way, with the
same messages. They hold no secrets, only the places where secrets are kept, so every field may be shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from amqp_rt.addresses import parse_url
from amqp_rt.durations import UNITS, parse_duration
from amqp_rt.errors import ConnectFailed

from ..endpoints import Endpoint

_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|m|h|d)")


def per_second(text: str) -> float:
    """Parse *text* as a rate per second: ``200/s``, ``1000/m``, ``5/h``; never 0.

    Raises:
        ValueError: The text is no rate.
    """
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) / UNITS[found[2]] if found else 0.0
    if not rate:
        raise ValueError(f"{text!r:.80} is not a rate such as 200/s or 1000/m")
    return rate


class Syntax(Struct, frozen=True):
    """Annotation of a text field that *read* must be able to parse. The job parses it again."""

    read: Callable[[str], Any]


#: Types of text fields with a syntax. An empty text means none and is not parsed.
Duration = Annotated[str, Syntax(parse_duration)]
Rate = Annotated[str, Syntax(per_second)]


class JobConf(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings common to all jobs: the broker's address and the credentials.

    Derived Structs need ``kw_only=True``, too. The constructor checks types, durations and rates.

    Raises:
        ValueError: A field is invalid; one sentence names it and gives the remedy.
    """

    url: Annotated[
        str, Meta(description="The broker: amqp://HOST[:PORT], amqps://… or amqp+unix://PATH.")
    ] = "amqp://127.0.0.1:5672"
    credentials_file: Annotated[
        str, Meta(description="A file on each machine that holds one line, user:password.")
    ] = ""
    credentials_env: Annotated[
        str, Meta(description="An environment variable on each machine that holds user:password.")
    ] = ""
    mechanism: Annotated[
        str,
        Meta(
            description="PLAIN, SCRAM-SHA-256, EXTERNAL or ANONYMOUS; chosen by the credentials by default."
        ),
    ] = ""
    tls_ca: Annotated[
        str, Meta(description="PEM file of the authorities to believe; by default the system's.")
    ] = ""
    tls_cert: Annotated[
        str, Meta(description="PEM file of our certificate, for brokers that ask for one.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its key, if that is another one.")] = ""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            given = getattr(self, name)
            try:
                one = isinstance(given, str) and get_origin(bare(kind)) is tuple
                value = msgspec.convert((given,) if one else given, kind)
                # An empty text means none, and is not parsed.
                for read in readers(kind) if value else ():
                    read(value)
            except msgspec.ValidationError as error:
                said = str(error).partition(" - at `$")[0]
                raise ValueError(f"{name} is {given!r:.80}: {said[:1].lower()}{said[1:]}") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)
        try:
            url = parse_url(self.url)
        except ConnectFailed as error:
            raise ValueError(f"url: {error.description}") from None
        if url.user is not None:
            raise ValueError(
                "url holds a user or a password, which Spark would show in plans and logs: "
                "name credentials_file or credentials_env instead"
            )

    @property
    def endpoint(self) -> Endpoint:
        """The broker's endpoint, for :mod:`amqp_rt_spark.connections`."""
        return Endpoint(
            url=self.url,
            credentials_file=self.credentials_file,
            credentials_env=self.credentials_env,
            mechanism=self.mechanism,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    def options(self, **further: Any) -> dict[str, str]:
        """Return the options of ``format("amqp")`` that reach this broker, with those of *further* that are
        neither None nor empty."""
        given = {
            "url": self.url,
            "credentialsFile": self.credentials_file,
            "credentialsEnv": self.credentials_env,
            "sasl.mechanism": self.mechanism,
            "tls.ca": self.tls_ca,
            "tls.cert": self.tls_cert,
            "tls.key": self.tls_key,
            **further,
        }
        return {name: _said(value) for name, value in given.items() if value not in (None, "", ())}


class StreamConf(JobConf, frozen=True, kw_only=True):
    """Settings common to jobs that run until they are stopped."""

    checkpoint: Annotated[
        str, Meta(description="Folder in which Spark keeps how far the job has got.")
    ] = ""
    once: Annotated[
        bool, Meta(description="Process the messages that are there now, and end; for cron.")
    ] = False
    every: Annotated[
        Duration, Meta(description="How often to look for more, while it goes on.")
    ] = "10s"
    max_messages: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Messages in one micro-batch at most.")
    ] = None

    @property
    def trigger(self) -> dict[str, Any]:
        """Arguments of ``DataStreamWriter.trigger``."""
        if self.once:
            return {"availableNow": True}
        return {"processingTime": f"{round(parse_duration(self.every) * 1000)} milliseconds"}


def readers(kind: Any) -> list[Callable[[str], Any]]:
    """Return the functions that must be able to parse a text of the type *kind*."""
    found = [each.read for each in getattr(kind, "__metadata__", ()) if isinstance(each, Syntax)]
    for each in get_args(kind):
        found += readers(each)
    return list(dict.fromkeys(found))


def bare(kind: Any) -> Any:
    """Return the type *kind* without annotations, and without None."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return bare(kind)
    return kind


def _said(value: Any) -> str:
    """Return *value* as the text of a Spark option."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


class Job(Struct, frozen=True):
    """A job, with the location of its function and its Struct.

    Attributes:
        name: Name of the command.
        place: ``module:function:Struct``; the module is in this package, and imported on use.
        help: One line for the help.
        stream: Whether it runs until it is stopped; its function then takes ``watch`` (:mod:`.running`).
        alone: Whether it needs no session if its checkpoint is on this machine.
    """

    name: str
    place: str
    help: str
    stream: bool = False
    alone: bool = False

    def load(self) -> tuple[Callable[..., Any], type[JobConf]]:
        """Import and return the job's function and the type of its settings."""
        module, function, conf = self.place.split(":")
        found = import_module(f"{__package__}.{module}")
        return getattr(found, function), getattr(found, conf)


JOBS: Final[tuple[Job, ...]] = (
    Job("ingest", "ingest:ingest:Ingest", "Logs and queues into a table of a lake.", stream=True),
    Job(
        "lag",
        "lag:lag:Lag",
        "How far a query is behind, by its checkpoint and by the broker.",
        alone=True,
    ),
    Job(
        "settle",
        "lag:settle:Settle",
        "Settle the messages that a query has written and not settled.",
        alone=True,
    ),
    Job(
        "deadletters",
        "deadletters:deadletters:Deadletters",
        "Dead letters by source, reason and shape; and back to where they came from.",
    ),
    Job("replay", "replay:replay:Replay", "Messages of a lake to an address, each once."),
    Job(
        "audit",
        "audit:audit:Audit",
        "Compare a lake with its logs; the exit status is 3 if they differ.",
    ),
    Job(
        "metrics",
        "metrics:metrics:Metrics",
        "Rates, latencies and redeliveries by address and window, from $journal.",
        stream=True,
    ),
)
