"""Operations of RabbitMQ's management on queues and exchanges, on bindings, and on the token of the connection.

The topology of the broker judges the rights of the client, as it does for 0-9-1, and returns them as errors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from amqp_rt.broker.bindings import LONG_NAME_MAX
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Exchange, Peer, QueueDeclaration, QueueState, Topology, ULong
from amqp_rt.values import Array

from .bindings import bind, listed, unbind
from .renewing import Renewals
from .requests import HttpRequest, HttpResponse, flag_of, map_of, text_of, unquoted

#: Yielded by a request that waits until it is called back.
WAITS: Final = -1
#: Argument that RabbitMQ's client for Python writes, and the one that it means.
_MISSPELT: Final = {"x-deliver-limit": "x-delivery-limit"}
#: Types of queues that RabbitMQ replicates, so that they belong to no connection.
_REPLICATED: Final = ("quorum", "stream")

_Steps = Generator[int, None, HttpResponse]


class Operations:
    """Carries out the requests of one connection.

    Args:
        topology: Queues, exchanges and bindings, as the peer may see and change them.
        peer: The peer.
        renewals: Renews the token of the connection.
    """

    def __init__(self, topology: Topology, peer: Peer, renewals: Renewals) -> None:
        self._topology = topology
        self._peer = peer
        self._renewals = renewals

    def carry_out(self, request: HttpRequest, resume: Callable[[], None]) -> _Steps:
        """Carry out *request* in steps; each yields the work done, or WAITS until *resume* is called.

        Returns:
            The response.

        Raises:
            AmqpError: It is refused.
        """
        path, _, query = request.path.partition("?")
        kind, *names = [unquoted(each) for each in path.removeprefix("/").split("/")]
        method = request.method
        if kind == "queues" and len(names) == 1:
            if method == "GET":
                yield from self._stored(names[0], resume)
                return HttpResponse(200, self._queue_map(self._topology.queue(names[0])))
            if method == "PUT":
                return self._declare_queue(names[0], map_of(request.body, "the body"))
            if method == "DELETE":
                yield from self._stored(names[0], resume)
                return self._delete_queue(names[0])
        elif kind == "queues" and len(names) == 2 and names[1] == "messages" and method == "DELETE":
            yield from self._stored(names[0], resume)
            count = 0
            for count in self._topology.purge_queue(names[0]):  # noqa: B007 - the last value is used
                yield 1
            return HttpResponse(200, {"message_count": ULong(count)})
        elif kind == "exchanges" and len(names) == 1:
            if method == "PUT":
                return self._declare_exchange(names[0], map_of(request.body, "the body"))
            if method == "DELETE":
                return self._delete_exchange(names[0])
        elif kind == "bindings" and not names:
            if method == "POST":
                return bind(self._topology, map_of(request.body, "the body"))
            if method == "GET":
                return (yield from listed(self._topology, query))
        elif kind == "bindings" and len(names) == 1 and method == "DELETE":
            return (yield from unbind(self._topology, path.rpartition("/")[2]))
        elif kind == "auth" and names == ["tokens"] and method == "PUT":
            return (yield from self._renew(request.body, resume))
        what = f"{method[:20]} {path[:200]}"
        if query:
            what += f" with the query {query[:80]!r}"
        raise AmqpError(f"there is no operation {what!r} here", condition="amqp:not-implemented")

    def _stored(self, name: str, resume: Callable[[], None]) -> Generator[int, None, None]:
        """Wait until messages that are being stored for queue *name* are in it, and count."""
        if self._topology.wait_stored(name, resume):
            yield WAITS

    def _renew(self, body: object, resume: Callable[[], None]) -> _Steps:
        """Replace the token of the connection by the one in *body*, octets."""
        if not isinstance(body, bytes):
            raise AmqpError(
                f"the body of a new token is binary, not {type(body).__name__}",
                condition="amqp:invalid-field",
            )
        renewal = self._renewals.begin(body, resume)
        while not renewal.done:
            yield WAITS
        if renewal.error is not None:
            raise renewal.error
        return HttpResponse(204)

    # --- queues ----------------------------------------------------------------------------

    def _declare_queue(self, name: str, body: Mapping[str, Any]) -> HttpResponse:
        if not name:
            raise AmqpError("a queue has a name", condition="amqp:invalid-field")
        given = map_of(body.get("arguments") or {}, "arguments")
        arguments = {_MISSPELT.get(key, key): value for key, value in given.items()}
        exclusive = flag_of(body, "exclusive", default=False)
        wanted = QueueDeclaration(
            name=name,
            durable=flag_of(body, "durable", default=True),
            exclusive=exclusive,
            auto_delete=flag_of(body, "auto_delete", default=False),
            arguments=arguments,
        )
        kind = arguments.get("x-queue-type")
        if kind in _REPLICATED and (exclusive or wanted.auto_delete or not wanted.durable):
            raise AmqpError(
                f"queue {name!r:.100}: a queue of the type {kind} is durable, and neither exclusive nor auto-delete",
                condition="amqp:precondition-failed",
            )
        existed = self._exists(name)
        state = self._topology.declare_queue(wanted)
        return HttpResponse(200 if existed else 201, self._queue_map(state))

    def _exists(self, name: str) -> bool:
        """Return whether queue *name* exists; if the peer may not know, its declaration is refused anyway."""
        try:
            self._topology.declaration(name)
        except AmqpError as error:
            return error.condition != "amqp:not-found"
        return True

    def _delete_queue(self, name: str) -> HttpResponse:
        try:
            count = self._topology.delete_queue(name)
        except AmqpError as error:
            # Deleting a queue that does not exist is no error, as in 0-9-1.
            if error.condition != "amqp:not-found":
                raise
            count = 0
        return HttpResponse(200, {"message_count": ULong(count)})

    def _queue_map(self, state: QueueState) -> dict[str, object]:
        declared = state.declared or QueueDeclaration(name=state.name, durable=True)
        kind = declared.arguments.get("x-queue-type")
        return {
            "name": state.name,
            "vhost": self._peer.virtual_host or "/",
            "durable": declared.durable,
            "exclusive": declared.exclusive,
            "auto_delete": declared.auto_delete,
            "arguments": dict(declared.arguments),
            "type": kind if isinstance(kind, str) else "classic",
            # There is one node, which leads.
            "leader": "amqp-rt",
            # The client for Java reads an array.
            "replicas": Array(["amqp-rt"], str),
            "message_count": ULong(state.messages),
            "consumer_count": ULong(state.consumers),
        }

    # --- exchanges --------------------------------------------------------------

    def _declare_exchange(self, name: str, body: Mapping[str, Any]) -> HttpResponse:
        self._topology.declare_exchange(
            Exchange(
                name=name,
                type=text_of(body, "type", "direct"),
                durable=flag_of(body, "durable", default=True),
                auto_delete=flag_of(body, "auto_delete", default=False),
                internal=flag_of(body, "internal", default=False),
                arguments=map_of(body.get("arguments") or {}, "arguments"),
            ),
            name_max=LONG_NAME_MAX,
            free_name=True,
        )
        return HttpResponse(204)

    def _delete_exchange(self, name: str) -> HttpResponse:
        try:
            self._topology.delete_exchange(name)
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
        return HttpResponse(204)
