"""Operations of the HTTP administration: entities created, read, updated, deleted and listed by requests.

A request is a method, a target, headers and a body; the answer is complete. Nothing here waits. The
entities themselves are behind :class:`Entities`, rights behind :class:`Authorizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from msgspec import Struct

from .atom import (
    ENTRY_TYPE,
    ERROR_TYPE,
    FEED_TYPE,
    Declared,
    Described,
    EntityPath,
    NamespaceFacts,
    read_entry,
    write_entry,
    write_error,
    write_feed,
    write_namespace,
)
from .declarations import Queue, Right, Rule, Subscription, Topic, check_name, check_path

#: Entities of a page unless ``$top`` asks for fewer, the limit of the service.
PAGE_MAX: Final = 100
#: Maximum number of characters of a request's target.
_TARGET_MAX: Final = 4_096
#: Maximum number of fields of its query.
_FIELDS_MAX: Final = 20
_SKIP_DIGITS_MAX: Final = 9
_AUTHORITY_MAX: Final = 300

_HEALTH: Final = b'{"status":"healthy","message":"Service is healthy."}'
#: Headers with tokens for the targets of forwarding, by option.
_SUPPLEMENTS: Final = {
    "forward_to": "servicebussupplementaryauthorization",
    "forward_dead_lettered_messages_to": "servicebusdlqsupplementaryauthorization",
}


class Response(Struct, frozen=True):
    """Answer to a request."""

    status: int
    #: Names in lower case. The length is not among them.
    headers: Mapping[str, str] = {}
    body: bytes = b""


class AdministrationError(Exception):
    """A request that fails. The text is sent to the client, and is one sentence."""

    status = 400
    #: Number of the failure at the service; JavaScript distinguishes some by it.
    sub_code = 40000


class EntityNotFound(AdministrationError):
    """The entity, or one that it belongs to, does not exist."""

    status, sub_code = 404, 40400


class EntityExists(AdministrationError):
    """An entity of that name exists."""

    status, sub_code = 409, 40900


class QuotaExceeded(AdministrationError):
    """The namespace or the entity has as many of these as it may have."""

    status, sub_code = 403, 40300


class AccessRefused(AdministrationError):
    """The request has no valid token, or its token gives too few rights; 401 for both, as the service."""

    status, sub_code = 401, 40100


class _MethodRefused(AdministrationError):
    """The resource does not have that method, but those in *allowed*."""

    status, sub_code = 405, 40500

    def __init__(self, text: str, allowed: str) -> None:
        super().__init__(text)
        self.allowed = allowed


class Entities(Protocol):
    """Entities of a namespace, as the administration uses them. Names are found in either case.

    Each method may raise :class:`EntityNotFound`, and those that change something ``ValueError`` for
    an entity that cannot be as declared.
    """

    def declare(self, path: EntityPath, declared: Declared) -> None:
        """Create an entity. A new subscription brings its rules.

        Raises:
            EntityExists: The name is taken; a queue, a topic and a hub share one.
            QuotaExceeded: There are too many of them.
        """

    def update(self, path: EntityPath, declared: Declared) -> None:
        """Replace the options of an entity; subscriptions of a topic and rules of a subscription stay."""

    def delete(self, path: EntityPath) -> None:
        """Delete an entity and all that belongs to it."""

    def get(self, path: EntityPath) -> Described:
        """Return an entity, with its name as it was declared."""

    def queues(self, skip: int, top: int) -> Sequence[Described]:
        """Return at most *top* queues in the order of their names, without the first *skip*."""

    def topics(self, skip: int, top: int) -> Sequence[Described]:
        """Return topics as :meth:`queues` does."""

    def subscriptions(self, topic: str, skip: int, top: int) -> Sequence[Described]:
        """Return subscriptions of a topic as :meth:`queues` does."""

    def rules(self, topic: str, subscription: str, skip: int, top: int) -> Sequence[Described]:
        """Return rules of a subscription as :meth:`queues` does."""

    def namespace(self) -> NamespaceFacts:
        """Return the properties of the namespace."""


class Authorizer(Protocol):
    """Judge of tokens."""

    def rights(self, token: str, resource: str) -> Collection[Right]:
        """Return the rights of *token* at *resource*.

        Args:
            token: ``SharedAccessSignature …``, or a JSON web token without ``Bearer``.
            resource: Address of an entity, ``https://host:port/topic/subscriptions/s``. Audiences of the
                SDKs are ``https://host:port`` (Python), the whole address of the request with its
                query in lower case (JavaScript), or ``host:port`` without a scheme (JavaScript, for
                the targets of forwarding).

        Raises:
            AccessRefused: The token is malformed, expired, not signed by a known key or for
                something else.
        """


class _Request(Struct, frozen=True):
    """A request whose target was read."""

    method: str
    #: Parts of the path, decoded; their case as it was sent.
    parts: tuple[str, ...]
    query: Mapping[str, str]
    #: By name in lower case.
    headers: Mapping[str, str]
    body: bytes
    #: Host and port that the client used.
    authority: str


class Administration:
    """The HTTP administration of a namespace.

    Args:
        entities: The entities.
        authorizer: Judge of the tokens of requests.
    """

    def __init__(self, entities: Entities, authorizer: Authorizer) -> None:
        self._entities = entities
        self._authorizer = authorizer

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Return the answer to a request.

        Args:
            method: In upper case. ``HEAD`` is answered as ``GET`` is; the body is not to be sent.
            target: Path and query, or an absolute address.
            headers: By name in lower case.
            body: The whole body.
        """
        try:
            request = _request(method, target, headers, body)
            # A request with a token means a queue of that name.
            if request.parts == ("health",) and "authorization" not in headers:
                _allow(request, "GET")
                return Response(200, {"content-type": "application/json"}, _HEALTH)
            return self._answer(request)
        except _MethodRefused as error:
            return _refusal(error, {"allow": error.allowed})
        except AdministrationError as error:
            return _refusal(error, {})
        except ValueError as error:
            return _refusal(AdministrationError(str(error)), {})

    def _answer(self, request: _Request) -> Response:
        first = request.parts[0].lower() if request.parts else ""
        if first == "$namespaceinfo" and len(request.parts) == 1:
            _allow(request, "GET")
            self._authorize(request, "$namespaceinfo")
            return _entry(200, write_namespace(self._entities.namespace(), request.authority))
        if first == "$resources":
            return self._list_entities(request)
        path, collection = _path_of(request.parts)
        self._authorize(request, "/".join(request.parts))
        if collection == "subscriptions":
            return self._list(
                request,
                "Subscriptions",
                lambda skip, top: self._entities.subscriptions(path[0], skip, top),
                path,
            )
        if collection == "rules":
            topic, subscription = path[0], path[-1]
            return self._list(
                request,
                "Rules",
                lambda skip, top: self._entities.rules(topic, subscription, skip, top),
                path,
            )
        _allow(request, "GET", "PUT", "DELETE")
        if request.method == "PUT":
            return self._put(request, path)
        if request.method == "DELETE":
            self._entities.delete(path)
            return Response(200)
        return self._show(200, request, path)

    # -- rights --------------------------------------------------------------------------------

    def _authorize(self, request: _Request, resource: str) -> None:
        """Check that the request's token gives the right to manage *resource*."""
        token = _token(request, "authorization")
        if not token:
            raise AccessRefused("the request has no header Authorization")
        if "Manage" not in self._authorizer.rights(token, _address(request, resource)):
            raise AccessRefused(f"the token does not give the right Manage at {resource!r:.300}")

    def _authorize_targets(self, request: _Request, declared: Declared) -> None:
        """Check that messages may be sent to the entities that *declared* forwards to.

        The token of the request counts, or the one that the SDKs add for each target.
        """
        for option, header in _SUPPLEMENTS.items():
            target = getattr(declared, option, None)
            if target is None:
                continue
            refusals = []
            for name in ("authorization", header):
                token = _token(request, name)
                if not token:
                    continue
                try:
                    rights = self._authorizer.rights(token, _address(request, target))
                except AccessRefused as refusal:
                    refusals.append(refusal)
                else:
                    if "Send" in rights or "Manage" in rights:
                        break
            else:
                reason = f": {refusals[-1]}" if refusals else ""
                raise AccessRefused(
                    f"no token of the request gives the right Send at {target!r:.300},"
                    f" to which the entity would forward{reason}"
                )

    # -- entities ------------------------------------------------------------------------------

    def _put(self, request: _Request, path: EntityPath) -> Response:
        """Create an entity, or update it if the request has ``If-Match``."""
        kinds: tuple[type[Declared], ...] = ((Queue, Topic), (Subscription,), (Rule,))[
            len(path) - 1
        ]
        description = read_entry(request.body, request.authority, expected=kinds)
        if "if-match" not in request.headers:
            declared: Declared = description.declare(path[-1])
            self._authorize_targets(request, declared)
            self._entities.declare(path, declared)
            return self._show(201, request, path)
        previous = self._entities.get(path).declared
        declared = description.declare(path[-1], previous)
        self._authorize_targets(request, declared)
        self._entities.update(path, declared)
        return self._show(200, request, path)

    def _show(self, status: int, request: _Request, path: EntityPath) -> Response:
        found = self._entities.get(path)
        named = _below(path[:-1], found)
        namespace = self._entities.namespace().name
        return _entry(status, write_entry(named, found, request.authority, namespace))

    # -- lists ---------------------------------------------------------------------------------

    def _list_entities(self, request: _Request) -> Response:
        kind = request.parts[1].lower() if len(request.parts) == 2 else ""
        lists = {"queues": self._entities.queues, "topics": self._entities.topics}
        if kind not in lists:
            raise EntityNotFound(f"{'/'.join(request.parts)!r:.300} is no list of entities")
        self._authorize(request, f"$Resources/{kind}")
        return self._list(request, kind.capitalize(), lists[kind], ())

    def _list(
        self,
        request: _Request,
        title: str,
        find: Callable[[int, int], Sequence[Described]],
        parent: tuple[str, ...],
    ) -> Response:
        _allow(request, "GET")
        skip = _query_number(request, "$skip", 0)
        top = min(_query_number(request, "$top", PAGE_MAX), PAGE_MAX)
        if top == 0:
            raise AdministrationError("$top is 0, but a page has at least 1 entity")
        # One more than asked for tells whether there is a next page.
        found = find(skip, top + 1)
        page = found[:top]
        more = len(found) > top
        base = f"https://{request.authority}/{'/'.join(request.parts)}"
        others = {
            name: value for name, value in request.query.items() if name not in ("$skip", "$top")
        }
        this, following = (
            f"{base}?{urlencode({'$skip': at, '$top': top, **others}, safe='$')}"
            for at in (skip, skip + top)
        )
        document = write_feed(
            title,
            [(_below(parent, each), each) for each in page],
            authority=request.authority,
            namespace=self._entities.namespace().name,
            this=this,
            following=following if more else None,
        )
        return Response(200, {"content-type": FEED_TYPE}, document)


def _request(method: str, target: str, headers: Mapping[str, str], body: bytes) -> _Request:
    if len(target) > _TARGET_MAX:
        raise AdministrationError(
            f"the address has {len(target)} characters; at most {_TARGET_MAX} are read"
        )
    authority = headers.get("host", "").strip()
    if len(authority) > _AUTHORITY_MAX:
        raise AdministrationError(f"the header Host is longer than {_AUTHORITY_MAX}")
    try:
        # Only what does not begin with a slash has a scheme and a host before its path (RFC 9112 §3.2).
        address = urlsplit(target) if not target.startswith("/") else None
        place, _, asked = target.partition("?")
        path = unquote(place if address is None else address.path, errors="strict")
        asked = asked if address is None else address.query
        query = dict(parse_qsl(asked, max_num_fields=_FIELDS_MAX, errors="strict"))
    except ValueError as error:
        raise AdministrationError(f"the address {target!r:.300} is malformed: {error}") from None
    # A trailing slash, as JavaScript's addresses of lists have, means nothing.
    path = path.removeprefix("/").removesuffix("/")
    return _Request(
        method="GET" if method == "HEAD" else method,
        parts=tuple(path.split("/")) if path else (),
        query=query,
        headers=headers,
        body=body,
        authority=authority,
    )


def _path_of(parts: Sequence[str]) -> tuple[EntityPath, str]:
    """Return the entity that a path names, and the list below it that is meant, if any.

    Names of queues and topics may contain slashes; ``subscriptions`` is no part of them.
    """
    lower = [each.lower() for each in parts]
    cut = lower.index("subscriptions") if "subscriptions" in lower else len(parts)
    if cut == 0:
        raise AdministrationError("the address names no queue or topic")
    name, below = "/".join(parts[:cut]), parts[cut:]
    check_path("entity", name)
    for kind, each in zip(("subscription", "rule"), below[1::2], strict=False):
        check_name(kind, each)
    match len(below):
        case 0:
            return (name,), ""
        case 1:
            return (name,), "subscriptions"
        case 2:
            return (name, below[1]), ""
        case 3 if lower[-1] == "rules":
            return (name, below[1]), "rules"
        case 4 if lower[-2] == "rules":
            return (name, below[1], below[3]), ""
    raise EntityNotFound(f"{'/'.join(parts)!r:.300} is the address of no entity")


def _below(parent: tuple[str, ...], described: Described) -> EntityPath:
    """Return the path of an entity, with its own name as it was declared."""
    path: EntityPath = (*parent, described.declared.name)  # type: ignore[assignment]
    return path


def _token(request: _Request, header: str) -> str:
    """Return the token in a header, empty without one.

    Python writes ``Bearer`` before a signature that it was given whole, and JavaScript writes none
    before the tokens for targets of forwarding.
    """
    value = request.headers.get(header, "").strip()
    scheme, _, rest = value.partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else value


def _address(request: _Request, resource: str) -> str:
    return f"https://{request.authority}/{resource}"


def _allow(request: _Request, *methods: str) -> None:
    if request.method not in methods:
        raise _MethodRefused(
            f"{'/'.join(request.parts)!r:.300} has no method {request.method!r:.40}",
            ", ".join(methods).replace("GET", "GET, HEAD"),
        )


def _query_number(request: _Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _SKIP_DIGITS_MAX):
        raise AdministrationError(f"{name} is {text!r:.80}, not a whole number from 0")
    return int(text)


def _entry(status: int, document: bytes) -> Response:
    return Response(status, {"content-type": ENTRY_TYPE}, document)


def _refusal(error: AdministrationError, headers: Mapping[str, str]) -> Response:
    detail = f"SubCode={error.sub_code}. {error}"
    document = write_error(error.status, detail)
    return Response(error.status, {"content-type": ERROR_TYPE, **headers}, document)
