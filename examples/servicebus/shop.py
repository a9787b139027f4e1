"""A shop on Azure Service Bus, as it runs in production: it knows Microsoft's SDK and no tests.

Entities: the queue ``orders``, where the worker takes orders; the topic ``events``, where it reports sales;
the queue ``reminders`` with messages for later; the queue ``carts``, whose sessions are customers.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Self

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)

#: Seconds for which the worker waits for an order before it reports that there is none.
IDLE_S = 0.3


class Shop:
    """Clerk, worker and cashier of the shop, who share one connection string.

    Args:
        connection_string: As the portal of Azure shows it.
        stock: Pieces of each article.
    """

    def __init__(self, connection_string: str, stock: dict[str, int]) -> None:
        self.stock = stock
        self._client = ServiceBusClient.from_connection_string(
            connection_string, retry_total=3, retry_backoff_factor=0.05
        )
        # Opening one takes the SDK half a second.
        self._senders: dict[str, ServiceBusSender] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _sender(self, queue: str = "", topic: str = "") -> ServiceBusSender:
        name = queue or topic
        if name not in self._senders:
            self._senders[name] = (
                self._client.get_queue_sender(queue)
                if queue
                else self._client.get_topic_sender(topic)
            )
        return self._senders[name]

    # --- The clerk takes orders ---

    def place(self, number: str, article: str, region: str = "eu") -> None:
        """Send an order; a second one with the same number is dropped by the queue."""
        body = json.dumps({"number": number, "article": article, "region": region})
        self._sender("orders").send_messages(ServiceBusMessage(body, message_id=number))

    def remind(self, text: str, at: datetime) -> int:
        """Schedule a reminder; return the number by which it can be cancelled."""
        (number,) = self._sender("reminders").schedule_messages(ServiceBusMessage(text), at)
        return number

    def forget(self, number: int) -> None:
        """Cancel a reminder."""
        self._sender("reminders").cancel_scheduled_messages(number)

    # --- The worker sells ---

    def work(self) -> list[str]:
        """Process the orders that wait; return the numbers of those that were sold."""
        sold: list[str] = []
        with self._client.get_queue_receiver("orders") as receiver:
            while messages := receiver.receive_messages(20, max_wait_time=IDLE_S):
                numbers = [self._process(receiver, message) for message in messages]
                sold += filter(None, numbers)
        return sold

    def _process(
        self, receiver: ServiceBusReceiver, message: ServiceBusReceivedMessage
    ) -> str | None:
        try:
            order = json.loads(str(message))
            number, article = order["number"], order["article"]
        except (ValueError, KeyError) as error:
            receiver.dead_letter_message(message, reason="Malformed", error_description=repr(error))
            return None
        if not self.stock.get(article):
            # It stays in the queue, where the number finds it once there is stock.
            receiver.defer_message(message)
            return None
        self._sell(order)
        receiver.complete_message(message)
        return str(number)

    def _sell(self, order: dict[str, Any]) -> None:
        self.stock[order["article"]] -= 1
        event = ServiceBusMessage(
            json.dumps(order),
            subject="sold",
            application_properties={"region": order.get("region", "eu")},
        )
        self._sender(topic="events").send_messages(event)

    def sell_deferred(self, sequence_number: int) -> str | None:
        """Process an order that was deferred for lack of stock; return its number if it was sold."""
        with self._client.get_queue_receiver("orders") as receiver:
            (message,) = receiver.receive_deferred_messages(sequence_number)
            return self._process(receiver, message)

    # --- The cashier adds up carts ---

    def put_into_cart(self, customer: str, price: int) -> None:
        """Send a price to the cart of a customer."""
        self._sender("carts").send_messages(ServiceBusMessage(str(price), session_id=customer))

    def add_up(self, customer: str) -> int:
        """Add what is in the cart of a customer to the sum that its session keeps; return the sum."""
        with self._client.get_queue_receiver("carts", session_id=customer) as receiver:
            total = int(receiver.session.get_state() or b"0")
            while messages := receiver.receive_messages(20, max_wait_time=IDLE_S):
                for message in messages:
                    total += int(str(message))
                    receiver.session.set_state(str(total).encode())
                    receiver.complete_message(message)
            return total
