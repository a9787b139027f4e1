"""Profile of a listener for clients of RabbitMQ 4, and the host that its links reach first."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from amqp_rt import Broker, Profile
from amqp_rt.addresses import QUEUES, address_of
from amqp_rt.fronts import (
    RECEIVER,
    Error,
    ReceivingEndpoint,
    ReceivingLink,
    SendingLink,
    Source,
    Target,
)
from amqp_rt.fronts.hosts import BareHost

from .management import ManagementLinks
from .publishing import Publisher

#: Version that connections announce. Clients use the features of this version of RabbitMQ: renewal of tokens and filter
#: expressions (4.1), SQL filters and direct reply-to (4.2), the activity of consumers and delayed retries (4.3).
VERSION: Final = "4.3.0"
#: Key of the flow that tells a consumer whether it is the active one.
ACTIVE: Final = "rabbitmq:active"
#: Address at which clients manage queues, and the management node of the broker, whose rule of access it has: any
#: right opens links to it, and each operation is checked.
MANAGEMENT: Final = "/management"
_OWN_MANAGEMENT: Final = "$management"


def profile(broker: Broker) -> Profile:
    """Return the profile of listeners of *broker* for clients of RabbitMQ 4 (entry point ``amqp_rt.profiles``)."""
    return Profile(
        name="rabbitmq",
        properties={"product": "RabbitMQ", "version": VERSION},
        address=_address,
        # proton refuses a link that is answered with another name of its queue.
        echo_addresses=True,
        # Clients publish to queues and exchanges only, replies too.
        dynamic_address=lambda name: QUEUES + quote(name, safe=""),
        activity=ACTIVE,
        # Who only publishes renews its token there.
        management_open=True,
        token_passwords=True,
        hosts=(RabbitHost(broker),),
    )


def _address(text: str) -> str:
    """Return the address of the node that *text* of a client stands for."""
    return _OWN_MANAGEMENT if text == MANAGEMENT else address_of(text)


class RabbitHost(BareHost):
    """Host of the links of a listener's clients: management, and publishers, whose messages get annotations.

    Consumers attach to the nodes of the broker.

    Args:
        broker: The broker.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._management = ManagementLinks(broker)

    def attach(self, link: ReceivingLink | SendingLink) -> bool:
        """Accept a link to the management node or of a publisher; return False for others."""
        for terminus in (link.source, link.target):
            if isinstance(terminus, Source | Target):
                # The client for JavaScript writes LINK_DETACH, which RabbitMQ ignores.
                terminus.expiry_policy = terminus.expiry_policy.lower().replace("_", "-")
        if link.asked == MANAGEMENT:
            self._management.attach(link)
            return True
        target = link.target
        if link.role != RECEIVER or not isinstance(target, Target) or not target.address:
            return False
        publishing: ReceivingLink = link  # type: ignore[assignment]  # of this role
        found = self.relay(str(target.address), publishing)
        if found is None:
            return False
        if isinstance(found, Error):
            link.refuse(found)
            return True
        publishing.accept(
            found,
            target=Target(address=target.address),
            max_message_size=self._broker.host.limits.message_size_max,
        )
        return True

    def relay(self, address: str, link: ReceivingLink) -> ReceivingEndpoint | Error | None:
        """Return the endpoint for messages to a queue or an exchange at *address*; None if there is none."""
        if address.startswith("$") or self._is_served(address):
            return None
        found = self._broker.host.relay(address, link)
        if found is None or isinstance(found, Error):
            return found
        return Publisher(found, address, self._broker.host.limits)

    def _is_served(self, address: str) -> bool:
        """Return whether a node of the application is at *address*, which comes before queues that would be created."""
        try:
            return self._broker.container.nodes.find(address) is not None
        except ValueError:
            # It is, and refuses the link: a part of the address is no value for the handler.
            return True
