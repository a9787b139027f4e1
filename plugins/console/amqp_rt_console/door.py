"""The HTTP door of a broker: listener, sessions, API and pages in one object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import Final
from urllib.parse import urlsplit

import trio
from msgspec import Struct
from starlette.routing import BaseRoute, Router

from amqp_rt import Broker
from amqp_rt.addresses import WEB_SCHEMES, host_name_of, origin_of
from amqp_rt.cli.running import is_local_host
from amqp_rt.container.doors import DoorArrival
from amqp_rt.errors import AmqpError

from . import pages
from .api import Api
from .guard import Guard, Origins
from .places import StreamPlaces
from .problems import Problem
from .scraping import MetricsPage
from .server import HttpServer, Receive, Scope, Send
from .sessions import WebSessions

#: Host and port of a URL that names none: by default only this machine reaches the door.
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 15_672
#: Entry points of plug-ins that add routes: functions of the broker.
ROUTES: Final = "amqp_rt.door_routes"


class DoorUrl(Struct, frozen=True):
    """Parts of the URL of a door."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_door_url(text: str) -> DoorUrl:
    """Return the parts of ``http://HOST:PORT`` or ``https://HOST:PORT``.

    Raises:
        AmqpError: It is no such URL.
    """
    try:
        url = urlsplit(text)
        port = DEFAULT_PORT if url.port is None else url.port
    except ValueError:
        url, port = urlsplit(""), 0
    if (
        url.scheme not in ("http", "https")
        or url.path.strip("/")
        or url.query
        or url.username is not None
    ):
        raise AmqpError(
            f"{text!r:.200} is no URL of the HTTP door: it is http://HOST:PORT or https://HOST:PORT, "
            f"such as http://127.0.0.1:{DEFAULT_PORT}",
            condition="amqp:invalid-field",
        )
    return DoorUrl(url.hostname or DEFAULT_HOST, port, url.scheme == "https")


class HttpDoor:
    """HTTP door of *broker*: a JSON API below ``/api/v1/``, and pages for browsers.

    ::

        async with broker, HttpDoor(broker, "http://127.0.0.1:15672").open() as url:
            ...

    Args:
        broker: The broker, whose users log in.
        url: Where to listen, ``http://HOST:PORT`` or, with the broker's certificates, ``https://HOST:PORT``. Passwords must
            not cross networks in clear: ``http`` is for this machine, unless the broker has ``plain_in_clear``.
        read_only: Refuse requests that change something.
        hosts: Further names under which browsers reach the door. IP addresses and the hosts of *url* and *origin* need none.
        origin: Where browsers reach the door behind a proxy, such as ``https://console.example``. With ``https`` they send
            cookies over TLS only.

    Raises:
        AmqpError: *url* or *origin* is no such URL, one of *hosts* is no name, or *url* is not for this machine and has no TLS.
    """

    def __init__(
        self,
        broker: Broker,
        url: str,
        *,
        read_only: bool = False,
        hosts: Collection[str] = (),
        origin: str | None = None,
    ) -> None:
        self.broker = broker
        self.read_only = read_only
        self.url = parse_door_url(url)
        if (
            not self.url.tls
            and not is_local_host(self.url.host)
            and not broker.container.entry.takes_passwords_in_clear
        ):
            raise AmqpError(
                f"{self.url} would take passwords and sessions from other machines in clear: write https:// "
                "and give a certificate, or listen on 127.0.0.1 behind a proxy with TLS",
                condition="amqp:not-allowed",
            )
        self._hosts = {self.url.host, *map(host_name_of, hosts)}
        self._origin = None if origin is None else origin_of(origin, schemes=WEB_SCHEMES)
        if self._origin is not None:
            self._hosts.add(urlsplit(self._origin).hostname or "")
        #: Answers that go on, such as live views: each holds a place while it is sent.
        self.streams = StreamPlaces(broker.container.limits)
        self._sessions: WebSessions | None = None
        self._server: HttpServer | None = None

    @property
    def sessions(self) -> WebSessions:
        """Sessions of the users, while the door is open."""
        if self._sessions is None:
            raise RuntimeError("the door is not open")
        return self._sessions

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen until the end of the block, which closes all connections and sessions; return the URL with the port.

        Raises:
            ConnectFailed: It cannot listen there.
        """
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            try:
                yield await self._listen(nursery)
            except BaseException as error:
                # Raised again below: nurseries would wrap the exception in a group.
                failure = error
            finally:
                self._sessions = self._server = None
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def accept(self, stream: trio.abc.Stream, arrival: DoorArrival) -> None:
        """Answer the requests on *stream*, until either side ends it.

        Args:
            stream: A stream of HTTP/1.1, without TLS.
            arrival: How it has arrived.
        """
        if self._server is None:
            raise RuntimeError("the door is not open")
        await self._server.serve(stream, arrival)

    async def _listen(self, nursery: trio.Nursery) -> str:
        """Accept connections in tasks of *nursery*; return the URL with the port."""
        self._sessions = WebSessions(self.broker, nursery)
        console = pages.Console(self.broker, self.streams, read_only=self.read_only)
        nursery.start_soon(console.run)
        api, metrics = Api(self.broker), MetricsPage(self.broker)
        routes = [*api.routes(), *metrics.routes(), *self._plugged_routes(), *console.routes()]
        guard = Guard(
            Router(routes, redirect_slashes=False, default=_not_found),
            broker=self.broker,
            sessions=self._sessions,
            hosts=self._hosts,
            origins=Origins(self._origin, local=is_local_host(self.url.host)),
            read_only=self.read_only,
            show=pages.problem_page,
            door=self,
        )
        self._server = HttpServer(guard, self.broker.container.limits)
        url = self.url
        port = await self.broker.container.open_door(
            url.host, url.port, self.accept, tls=url.tls, nursery=nursery
        )
        return str(DoorUrl(url.host, port, url.tls))

    def _plugged_routes(self) -> Iterator[BaseRoute]:
        """Yield the routes of plug-ins, whose requests are admitted as all others are."""
        for each in entry_points(group=ROUTES):
            yield from each.load()(self.broker)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise Problem(404, "there is no such page", "amqp:not-found")
