"""Declaring, binding, purging and deleting exchanges and queues (0-9-1 §1.6 and §1.7).

The topology of the broker judges the rights of the client, and returns them as errors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import Final

from amqp_rt.addresses import REPLY_TO, is_direct_reply
from amqp_rt.fronts import AmqpError, Error, Exchange, QueueDeclaration, Target, Topology
from amqp_rt.fronts.links import FrontReceivingLink

from . import faults
from . import methods as m
from .execution import Execution
from .faults import Fault
from .messages import to_arguments
from .routes import Routes
from .sessions import Session

#: Cost of one step of a purge, in frames.
_PURGE_WORK: Final = 100


class Declarations:
    """Carries out the methods of exchanges and queues.

    Args:
        session: The session of the channel.
        execution: The order of its methods.
        routes: Messages on their way to queues.
    """

    def __init__(self, session: Session, execution: Execution, routes: Routes) -> None:
        self.session = session
        self.execution = execution
        self.routes = routes
        #: Name of the queue declared last: an empty name in a method refers to it.
        self._queue = ""

    @property
    def topology(self) -> Topology:
        """Exchanges and queues of the virtual host.

        Raises:
            Fault: The connection belongs to an application that has none.
        """
        topology = self.session.engine.topology
        if topology is None:
            raise Fault(faults.NOT_IMPLEMENTED, "nothing can be declared here")
        return topology

    def queue_named(self, name: str) -> str:
        """Return *name*, or that of the queue declared last if it is empty.

        Raises:
            Fault: Neither is known.
        """
        if name:
            return name
        if not self._queue:
            raise Fault(faults.NOT_FOUND, "no queue is named, and none was declared here before")
        return self._queue

    # --- exchanges -----------------------------------------------------------------------

    def declare_exchange(self, method: m.ExchangeDeclare) -> None:
        """Create an exchange, or check that there is one like it."""
        if method.passive:
            self.topology.exchange(method.exchange)
        else:
            try:
                self.topology.declare_exchange(
                    Exchange(
                        name=method.exchange,
                        type=method.type,
                        durable=method.durable,
                        auto_delete=method.auto_delete,
                        internal=method.internal,
                        arguments=to_arguments(method.arguments),
                    )
                )
            except AmqpError as error:
                if error.condition == "amqp:not-implemented":
                    # Reply code of the standard for an unknown exchange type.
                    raise Fault(faults.COMMAND_INVALID, error.description) from error
                raise
        if not method.no_wait:
            self.session.write(m.ExchangeDeclareOk())

    def delete_exchange(self, method: m.ExchangeDelete) -> None:
        """Delete an exchange; one that does not exist is no error (RabbitMQ)."""
        try:
            self.topology.delete_exchange(method.exchange, if_unused=method.if_unused)
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
        if not method.no_wait:
            self.session.write(m.ExchangeDeleteOk())

    def bind_exchange(self, method: m.ExchangeBind) -> None:
        """Bind an exchange to another one (RabbitMQ's extension)."""
        self.topology.bind_exchange(
            method.destination, method.source, method.routing_key, to_arguments(method.arguments)
        )
        if not method.no_wait:
            self.session.write(m.ExchangeBindOk())

    def unbind_exchange(self, method: m.ExchangeUnbind) -> None:
        """Remove the binding of an exchange to another one."""
        self.topology.unbind_exchange(
            method.destination, method.source, method.routing_key, to_arguments(method.arguments)
        )
        if not method.no_wait:
            self.session.write(m.ExchangeUnbindOk())

    # --- queues --------------------------------------------------------------------------

    def declare_queue(self, method: m.QueueDeclare) -> None:
        """Create a queue, or check that there is one like it, and answer with its counts."""
        if method.queue == REPLY_TO:
            self._answer_for_replies(method)
            return
        if is_direct_reply(method.queue):
            self._find_replies(method)
            return
        name = self.queue_named(method.queue) if method.passive else method.queue
        self.routes.when_stored(name, method, partial(self._declare_queue, name, method))

    def _answer_for_replies(self, method: m.QueueDeclare) -> None:
        if not method.no_wait:
            self.session.write(m.QueueDeclareOk(queue=method.queue, consumer_count=1))

    def _find_replies(self, method: m.QueueDeclare) -> None:
        """Check for a client whether a requester still accepts replies, which may be at another member of a mesh.

        A link can be attached to its address as long as it does.
        """
        session = self.session
        link = FrontReceivingLink(
            session,
            session.engine,
            session.link_name("declare-replies"),
            Target(address=method.queue),
        )
        link.on_answer = partial(self._found_replies, method, link)
        self.execution.held_up = True
        session.request(link)

    def _found_replies(
        self, method: m.QueueDeclare, link: FrontReceivingLink, refused: Error | None
    ) -> None:
        session = self.session
        if session.ended:
            return
        session.drop(link)
        if refused is not None:
            fault = Fault(faults.NOT_FOUND, "the consumer of that reply address has gone")
            session.fail(fault, method)
            return
        self._answer_for_replies(method)
        self.execution.resume()

    def _declare_queue(self, name: str, method: m.QueueDeclare) -> None:
        if method.passive:
            state = self.topology.queue(name)
        else:
            state = self.topology.declare_queue(
                QueueDeclaration(
                    name=name,
                    durable=method.durable,
                    exclusive=method.exclusive,
                    auto_delete=method.auto_delete,
                    arguments=to_arguments(method.arguments),
                )
            )
        self._queue = state.name
        if not method.no_wait:
            self.session.write(
                m.QueueDeclareOk(
                    queue=state.name,
                    message_count=state.messages,
                    consumer_count=state.consumers,
                )
            )

    def bind_queue(self, method: m.QueueBind) -> None:
        """Bind a queue to an exchange."""
        queue = self.queue_named(method.queue)
        key = method.routing_key
        if not key and not method.queue:
            # With both names empty, the routing key is the name of the queue (§1.7.2.3).
            key = queue
        self.topology.bind_queue(queue, method.exchange, key, to_arguments(method.arguments))
        if not method.no_wait:
            self.session.write(m.QueueBindOk())

    def unbind_queue(self, method: m.QueueUnbind) -> None:
        """Remove the binding of a queue to an exchange."""
        queue = self.queue_named(method.queue)
        self.topology.unbind_queue(
            queue, method.exchange, method.routing_key, to_arguments(method.arguments)
        )
        self.session.write(m.QueueUnbindOk())

    def purge_queue(self, method: m.QueuePurge) -> None:
        """Remove the messages of a queue that no consumer has, in turns."""
        queue = self.queue_named(method.queue)
        self.routes.when_stored(queue, method, partial(self._purge_queue, queue, method))

    def _purge_queue(self, queue: str, method: m.QueuePurge) -> None:
        self.execution.run(self._purge_in_steps(self.topology.purge_queue(queue), method))

    def _purge_in_steps(
        self, purging: Iterator[int], method: m.QueuePurge
    ) -> Generator[int, None, None]:
        count = 0
        for count in purging:  # noqa: B007 - the last value is used
            yield _PURGE_WORK
        if not method.no_wait:
            self.session.write(m.QueuePurgeOk(message_count=count))

    def delete_queue(self, method: m.QueueDelete) -> None:
        """Delete a queue; one that does not exist is no error (RabbitMQ)."""
        queue = self.queue_named(method.queue)
        self.routes.when_stored(queue, method, partial(self._delete_queue, queue, method))

    def _delete_queue(self, queue: str, method: m.QueueDelete) -> None:
        count = 0
        try:
            count = self.topology.delete_queue(
                queue,
                if_unused=method.if_unused,
                if_empty=method.if_empty,
            )
        except AmqpError as error:
            if error.condition != "amqp:not-found":
                raise
        if not method.no_wait:
            self.session.write(m.QueueDeleteOk(message_count=count))
