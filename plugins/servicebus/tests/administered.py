"""A namespace in memory behind the HTTP administration, for the tests of its modules."""

from __future__ import annotations

import base64
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import quote, unquote

import trustme
from amqp_rt_servicebus.admin_http import HttpEngine
from amqp_rt_servicebus.administration import (
    AccessRefused,
    Administration,
    EntityExists,
    EntityNotFound,
    QuotaExceeded,
    Response,
)
from amqp_rt_servicebus.atom import (
    Declared,
    Described,
    EntityPath,
    NamespaceFacts,
    RuntimeFacts,
)
from amqp_rt_servicebus.declarations import Queue, Right, SasKey, Subscription, Topic

#: 2026-01-02T03:04:05.25Z
CREATED = 1_767_323_045.25
MANAGER = "RootManageSharedAccessKey"
KEYS = {
    MANAGER: SasKey("SAS_KEY_VALUE"),
    "listener": SasKey("listening", rights=("Listen",)),
}
BEARER = "a.b.c"
NEVER = RuntimeFacts(created_at=CREATED, updated_at=CREATED)


class MemoryEntities:
    """Entities in dictionaries, by lower-case names."""

    def __init__(self, namespace: NamespaceFacts | None = None, *, entities_max: int = 500) -> None:
        self.found: dict[tuple[str, ...], Described] = {}
        self.facts = namespace or NamespaceFacts(
            name="tests", created_at=CREATED, modified_at=CREATED + 1
        )
        self._entities_max = entities_max

    def declare(self, path: EntityPath, declared: Declared) -> None:
        key = _key(path)
        if key in self.found:
            raise EntityExists(f"{'/'.join(path)!r} exists")
        self._parent(key)
        if len(self.found) >= self._entities_max:
            raise QuotaExceeded(f"the namespace has {self._entities_max} entities")
        self.found[key] = Described(declared, NEVER)
        if isinstance(declared, Subscription):
            for rule in declared.rules or ():
                self.declare((path[0], path[1], rule.name), rule)  # type: ignore[misc]

    def update(self, path: EntityPath, declared: Declared) -> None:
        facts = self.get(path).facts
        self.found[_key(path)] = Described(declared, facts)

    def delete(self, path: EntityPath) -> None:
        self.get(path)
        key = _key(path)
        for each in [each for each in self.found if each[: len(key)] == key]:
            del self.found[each]

    def get(self, path: EntityPath) -> Described:
        key = _key(path)
        if key not in self.found:
            raise EntityNotFound(f"{'/'.join(path)!r} does not exist")
        found = self.found[key]
        if not isinstance(found.declared, Topic):
            return found
        below = [each for each in self.found if len(each) == 2 and each[0] == key[0]]
        facts = found.facts
        return Described(
            found.declared,
            RuntimeFacts(
                created_at=facts.created_at,
                updated_at=facts.updated_at,
                accessed_at=facts.accessed_at,
                size_in_bytes=facts.size_in_bytes,
                counts=facts.counts,
                subscription_count=len(below),
            ),
        )

    def queues(self, skip: int, top: int) -> Sequence[Described]:
        return self._page(lambda key, each: isinstance(each.declared, Queue), skip, top)

    def topics(self, skip: int, top: int) -> Sequence[Described]:
        return self._page(lambda key, each: isinstance(each.declared, Topic), skip, top)

    def subscriptions(self, topic: str, skip: int, top: int) -> Sequence[Described]:
        return self._below((topic,), skip, top)

    def rules(self, topic: str, subscription: str, skip: int, top: int) -> Sequence[Described]:
        return self._below((topic, subscription), skip, top)

    def namespace(self) -> NamespaceFacts:
        return self.facts

    def holds(self, path: EntityPath, **facts: object) -> None:
        """Change the facts of an entity."""
        found = self.found[_key(path)]
        values = {each: getattr(found.facts, each) for each in found.facts.__struct_fields__}
        self.found[_key(path)] = Described(found.declared, RuntimeFacts(**(values | facts)))

    def _below(self, parent: EntityPath, skip: int, top: int) -> Sequence[Described]:
        self.get(parent)
        key = _key(parent)
        return self._page(lambda each, _: each[:-1] == key, skip, top)

    def _page(
        self, wanted: Callable[[tuple[str, ...], Described], bool], skip: int, top: int
    ) -> Sequence[Described]:
        keys = sorted(key for key, each in self.found.items() if wanted(key, each))
        return [self.get(key) for key in keys[skip : skip + top]]  # type: ignore[arg-type]

    def _parent(self, key: tuple[str, ...]) -> None:
        if key[:-1]:
            parent = self.get(key[:-1]).declared  # type: ignore[arg-type]
            if not isinstance(parent, (Topic, Subscription)):
                raise EntityNotFound(f"{'/'.join(key[:-1])!r} is no topic")


def _key(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each.lower() for each in path)


class SignedTokens:
    """Judge of shared access signatures, and of one bearer token that may do everything."""

    def rights(self, token: str, resource: str) -> Collection[Right]:
        if token == BEARER:
            return ("Manage", "Send", "Listen")
        kind, _, rest = token.partition(" ")
        fields = dict(each.partition("=")[::2] for each in rest.split("&"))
        key = KEYS.get(fields.get("skn", ""))
        if kind != "SharedAccessSignature" or key is None:
            raise AccessRefused("the token is not signed by a known key")
        signed = f"{fields['sr']}\n{fields['se']}".encode()
        digest = hmac.digest(key.key.encode(), signed, "sha256")
        if unquote(fields["sig"]) != base64.b64encode(digest).decode():
            raise AccessRefused("the token is not signed by its key")
        if int(fields["se"]) < time.time():
            raise AccessRefused("the token has expired")
        audience, wanted = _place(unquote(fields["sr"])), _place(resource)
        if wanted != audience and not wanted.startswith(f"{audience}/"):
            raise AccessRefused(f"the token is for {audience}, not {wanted}")
        return key.rights


def _place(address: str) -> str:
    return address.lower().rpartition("://")[2].partition("?")[0].rstrip("/")


def signed(name: str = MANAGER, audience: str = "https://localhost", *, lives_s: int = 60) -> str:
    """Return a token as SDKs make them."""
    place, until = quote(audience, safe=""), int(time.time()) + lives_s
    digest = hmac.digest(KEYS[name].key.encode(), f"{place}\n{until}".encode(), "sha256")
    text = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={place}&sig={text}&se={until}&skn={name}"


class Served:
    """The administration behind a port with TLS."""

    def __init__(self, entities: MemoryEntities, port: int, ca_file: str) -> None:
        self.entities = entities
        self.port = port
        self.ca_file = ca_file
        #: Requests so far: method and target.
        self.requests: list[tuple[str, str]] = []

    @property
    def host(self) -> str:
        return f"localhost:{self.port}"

    def connection_string(self, name: str = MANAGER, key: str | None = None) -> str:
        return (
            f"Endpoint=sb://{self.host};SharedAccessKeyName={name};"
            f"SharedAccessKey={KEYS[name].key if key is None else key}"
        )


@contextmanager
def serving(entities: MemoryEntities, folder: str) -> Iterator[Served]:
    """Serve *entities* over HTTPS, with threads that block; certificates are in *folder*."""
    authority = trustme.CA()
    ca_file = f"{folder}/ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    listener = socket.create_server(("localhost", 0))
    served = Served(entities, listener.getsockname()[1], ca_file)
    administration = Administration(entities, SignedTokens())

    def handle(method: str, target: str, headers: dict[str, str], body: bytes) -> Response:
        served.requests.append((method, target))
        return administration.handle(method, target, headers, body)

    over: list[bool] = []
    open_now: set[socket.socket] = set()
    threads: list[threading.Thread] = []

    def serve(plain: socket.socket) -> None:
        # The client may go at any time, and the test may end before it.
        with plain, suppress(OSError), context.wrap_socket(plain, server_side=True) as stream:
            # This is the socket now; *plain* is detached.
            open_now.add(stream)
            _serve_one(stream, handle)

    def accept() -> None:
        while True:
            plain, _ = listener.accept()
            if over:
                plain.close()
                return
            # Ends a thread that nothing else ends.
            plain.settimeout(60)
            open_now.add(plain)
            threads.append(threading.Thread(target=serve, args=(plain,)))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield served
    finally:
        over.append(True)
        socket.create_connection(("localhost", served.port)).close()
        accepting.join()
        listener.close()
        for each in list(open_now):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def _serve_one(stream: ssl.SSLSocket, handle: Callable[..., Response]) -> None:
    engine = HttpEngine(handle, time.monotonic())
    while not engine.closed:
        engine.receive(stream.recv(65_536), time.monotonic())
        while data := engine.take():
            stream.sendall(data)
