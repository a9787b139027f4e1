"""Routes of published messages: the inlets and links of the nodes that they go to."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator
from functools import partial
from typing import Final

from amqp_rt.fronts import Error, Target
from amqp_rt.fronts.links import FrontReceivingLink, PublishingLink

from . import faults
from . import methods as m
from .execution import Execution
from .faults import Fault
from .links import Way
from .messages import to_arguments
from .sessions import Session

#: Links of a channel to publish to nodes without an inlet.
_LINKS_MAX: Final = 256
#: Routes that are found between two checks of the work done.
_ROUTES_OF_A_STEP: Final = 10


class Routes:
    """Inlets and links by which a channel publishes.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
    """

    def __init__(self, session: Session, execution: Execution) -> None:
        self.session = session
        self.execution = execution
        #: Links to nodes without an inlet, by the names of the nodes.
        self._senders: dict[str, FrontReceivingLink] = {}
        #: Link shared by all messages to nodes that need no link of their own; None after the end
        #: of the channel.
        self._publishing: PublishingLink | None = self._new_publishing()

    def way_to(self, name: str, *, routed: bool) -> Way:
        """Return the inlet of node *name*, or a link to it, which is requested if there is none.

        Raises:
            Fault: The node refuses messages from this client.
        """
        session = self.session
        topology = session.engine.topology
        if topology is not None:
            publishing = self._publishing or self._new_publishing()
            way = topology.inlet(name, publishing, routed=routed)
            if isinstance(way, Error):
                raise Fault.of(way)
            if way is not None:
                return way, publishing, name
        link = self._senders.get(name)
        if link is None or link.over:
            if len(self._senders) >= _LINKS_MAX:
                oldest = next(iter(self._senders))
                session.drop(self._senders.pop(oldest))
            link = FrontReceivingLink(
                session,
                session.engine,
                session.link_name(f"publish-{name}"),
                Target(address=name),
            )
            self._senders[name] = link
            session.request(link)
        return None, link, name

    def _new_publishing(self) -> PublishingLink:
        session = self.session
        return PublishingLink(session, session.engine, f"channel-{session.number}")

    def find(
        self, method: m.BasicPublish, properties: m.BasicProperties, gone: Container[str]
    ) -> Generator[int, None, list[Way]]:
        """Find the ways of a message, but for queues in *gone*; yield the cost of each step in
        frames.

        Raises:
            Fault: There is no such exchange, or the routing keys in the headers are invalid.
        """
        engine = self.session.engine
        exchange = method.exchange
        topology = engine.topology
        keys = keys_of(method.routing_key, properties, engine.limits.routing_keys_max)
        names: dict[str, None] = {}
        if not exchange:
            names = dict.fromkeys(keys)
        elif topology is None:
            raise Fault(faults.NOT_FOUND, f"there is no exchange {exchange!r:.100}")
        else:
            headers = to_arguments(properties.headers or {})
            yield from topology.routing(exchange, keys, headers, names)
        found = []
        for name in names:
            if name in gone:
                continue
            found.append(self.way_to(name, routed=bool(exchange)))
            if not len(found) % _ROUTES_OF_A_STEP:
                yield _ROUTES_OF_A_STEP // 2
        return found

    def when_stored(self, queue: str, method: m.Method, step: Callable[[], None]) -> None:
        """Run *step* of *method* once the messages published to *queue* before are in it.

        A method sees the effects of those before it on its channel (§4.4), and a message that is
        still being written to the store is in no queue yet. Other channels are not held up.

        Callbacks are methods: of nested functions, one that another refers to would be kept by the frame of the compiled
        function, which it keeps, so that a channel would stay in memory until a full collection.
        """
        execution = self.execution
        topology = self.session.engine.topology
        done = partial(self._run, method, step)
        link = self._senders.get(queue)
        if link is not None and not (link.attached or link.over):
            # The link that publishes to this queue still waits for authorisation.
            execution.held_up = True
            link.on_answer = partial(self._authorised, queue, method, step)
        elif topology is None or not topology.wait_stored(
            queue, partial(execution.continue_with, done)
        ):
            done()
        else:
            execution.held_up = True

    def _authorised(
        self, queue: str, method: m.Method, step: Callable[[], None], _refused: Error | None
    ) -> None:
        """Wait for the messages of a link to *queue*, whose attach has its answer, and run *step*."""
        self.execution.continue_with(partial(self.when_stored, queue, method, step))

    def _run(self, method: m.Method, step: Callable[[], None]) -> None:
        self.session.engine.context = method
        step()

    def end(self) -> None:
        """Forget the links, which refer to the session and are ended with it."""
        self._senders.clear()
        self._publishing = None


def keys_of(key: str, properties: m.BasicProperties, keys_max: int) -> list[str]:
    """Return the routing key and those of the headers ``CC`` and ``BCC`` (RabbitMQ's
    sender-selected distribution).

    Raises:
        Fault: A header is no array of strings, or there are more than *keys_max* keys.
    """
    headers = properties.headers
    keys = [key]
    if not headers:
        return keys
    for name in ("CC", "BCC"):
        others = headers.get(name)
        if others is None:
            continue
        if not isinstance(others, list) or not all(isinstance(each, str) for each in others):
            raise Fault(
                faults.PRECONDITION_FAILED, f"the header {name} is an array of routing keys"
            )
        keys += others
    if len(keys) > keys_max:
        raise Fault(
            faults.PRECONDITION_FAILED,
            f"a message has at most {keys_max} routing keys, those in CC and BCC included,"
            f" got {len(keys)}",
        )
    return keys
