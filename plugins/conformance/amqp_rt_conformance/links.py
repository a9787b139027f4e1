"""Links of a peer: those on which it sends, and those on which it receives deliveries."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from amqp_rt.net.traces.octets import CompositeValue, Frame

from .frames import IN_PASSING, shown
from .messages import body_of, message
from .verdicts import Departs, require

if TYPE_CHECKING:
    from .peers import Peer

#: Seconds to wait where the host must not send anything.
QUIET_S: Final = 0.2


class Outgoing(Struct):
    """A link on which we send."""

    peer: Peer
    channel: int
    handle: int
    #: Fields of the host's attach.
    answer: dict[str, Any]
    #: Our delivery-count.
    count: int
    #: Deliveries that we may still send.
    credit: int = 0

    @property
    def address(self) -> str:
        """Address of the target, from the host's attach."""
        return _address(self.answer, "target")

    def granted(self, flow: dict[str, Any]) -> None:
        """Apply the credit of the host's flow (Part 2 §2.6.7)."""
        seen = flow.get("delivery_count")
        limit = (self.count if seen is None else seen) + flow.get("link_credit", 0)
        self.credit = (limit - self.count) % 2**32

    def wait(self) -> None:
        """Wait until the host grants credit.

        Raises:
            Departs: It does not, in time.
        """
        while not self.credit:
            frame = self.peer.hear(
                "flow", "detach", "end", "close", passing={"empty", "disposition"}
            )
            require(
                frame.name == "flow",
                f"a link that may send is expected, and {shown(frame)} arrives",
            )

    def begin(self, tag: bytes | None = None, payload: bytes = b"", **fields: Any) -> int:
        """Send the first transfer of a delivery and return its delivery-id.

        With ``more=True`` other transfers follow.
        """
        self.wait()
        known = self.peer.channels[self.channel]
        number = known.next_delivery_id
        known.next_delivery_id = (number + 1) % 2**32
        self.count = (self.count + 1) % 2**32
        self.credit -= 1
        fields = {
            "delivery_id": number,
            "delivery_tag": token_hex(4).encode() if tag is None else tag,
            "message_format": 0,
            **fields,
        }
        self.go_on(payload, **fields)
        return number

    def go_on(self, payload: bytes = b"", **fields: Any) -> None:
        """Send another transfer of the delivery."""
        known = self.peer.channels[self.channel]
        known.next_outgoing_id = (known.next_outgoing_id + 1) % 2**32
        self.peer.send("transfer", channel=self.channel, payload=payload, handle=self.handle, **fields)  # fmt: skip

    def send(self, payload: bytes, **fields: Any) -> int:
        """Send a delivery of one transfer and return its delivery-id."""
        return self.begin(payload=payload, **fields)

    def outcome(self, number: int) -> Frame:
        """Return the host's disposition of a delivery.

        Raises:
            Departs: None arrives in time.
        """
        outcomes = self.peer.channels[self.channel].outcomes
        # The message itself may be forwarded to us before its disposition.
        early = []
        while number not in outcomes:
            frame = self.peer.hear("disposition", "transfer")
            if frame.name == "transfer":
                early.append(frame)
        self.peer.put_aside(early)
        return outcomes[number]

    def accepted(self, number: int) -> None:
        """Check that the host accepts and settles a delivery.

        Raises:
            Departs: It does not.
        """
        frame = self.outcome(number)
        state = frame.fields.get("state")
        require(
            isinstance(state, CompositeValue) and state.name == "accepted",
            f"a message is not accepted: {shown(frame)}",
        )
        require(
            frame.fields.get("settled"), f"rcv-settle-mode first, but not settled: {shown(frame)}"
        )

    def put(self, *bodies: str) -> None:
        """Send messages, and check that each is accepted."""
        for number in [self.send(message(body)) for body in bodies]:
            self.accepted(number)

    def close(self) -> None:
        """Close the link."""
        self.peer.send("detach", channel=self.channel, handle=self.handle, closed=True)
        self.peer.hear("detach", passing={*IN_PASSING, "disposition"})


class Delivery(Struct):
    """A delivery received on a link, in one or several transfers."""

    number: int
    tag: bytes
    payload: bytes
    settled: bool
    #: Sizes of its frames.
    sizes: list[int]
    first: dict[str, Any]

    @property
    def body(self) -> Any:
        """Body of a message made by :func:`message`."""
        return body_of(self.payload)


class Incoming(Struct):
    """A link on which we receive."""

    peer: Peer
    channel: int
    handle: int
    #: Fields of the host's attach.
    answer: dict[str, Any]
    #: The host's delivery-count, as far as known.
    count: int

    @property
    def address(self) -> str:
        """Address of the source, from the host's attach."""
        return _address(self.answer, "source")

    def flow(self, credit: int, **fields: Any) -> None:
        """Grant credit."""
        self.peer.flow(
            self.channel,
            handle=self.handle,
            delivery_count=self.count,
            link_credit=credit,
            **fields,
        )

    def get(self, within: float | None = None) -> Delivery | None:
        """Return the next delivery, None if none arrives in time."""
        patience = self.peer.patience_s if within is None else within
        until = time.monotonic() + patience
        found: Delivery | None = None
        while True:
            frame = self.peer.next(until - time.monotonic())
            if frame is None:
                return None
            if frame.name in ("empty", "flow", "disposition"):
                continue
            require(
                frame.name == "transfer", f"transfer is expected, and this arrives: {shown(frame)}"
            )
            fields = frame.fields
            if found is None:
                require(
                    "delivery_id" in fields and "delivery_tag" in fields,
                    f"the first transfer of a delivery has no id or no tag (§2.7.5): {shown(frame)}",
                )
                found = Delivery(
                    fields["delivery_id"], fields["delivery_tag"], b"", False, [], fields
                )
            found.payload += frame.payload
            found.sizes.append(frame.size)
            found.settled = found.settled or bool(fields.get("settled"))
            if fields.get("aborted"):
                found = None
            elif not fields.get("more"):
                self.count = (self.count + 1) % 2**32
                return found

    def take(self) -> Delivery:
        """Return the next delivery.

        Raises:
            Departs: None arrives in time.
        """
        found = self.get()
        if found is None:
            raise Departs(f"a message is expected, and none arrives in {self.peer.patience_s:g} s")
        return found

    def read(self, *bodies: str) -> list[Delivery]:
        """Receive messages with these bodies in any order; return them in the order of arrival.

        Raises:
            Departs: Other messages arrive, or too few.
        """
        found = [self.take() for _ in bodies]
        came = [delivery.body for delivery in found]
        require(
            sorted(map(str, came)) == sorted(bodies), f"{list(bodies)} are due, and {came} come"
        )
        return found

    def nothing(self, within: float = QUIET_S) -> None:
        """Check that no message arrives.

        Raises:
            Departs: One does.
        """
        found = self.get(within)
        if found is not None:
            raise Departs(f"no message is expected, and {found.body!r} arrives")

    def settle(
        self,
        first: Delivery,
        last: Delivery | None = None,
        *,
        state: Any = "accepted",
        settled: bool = True,
    ) -> None:
        """Send an outcome for a delivery or a range, unless *first* was sent settled."""
        if first.settled:
            return
        self.peer.send(
            "disposition",
            channel=self.channel,
            role="receiver",
            first=first.number,
            last=None if last is None else last.number,
            settled=settled,
            state=state,
        )

    def detach(self, *, closed: bool, **fields: Any) -> Frame:
        """Detach, and return the host's detach."""
        self.peer.send("detach", channel=self.channel, handle=self.handle, closed=closed, **fields)
        return self.peer.hear("detach", passing={*IN_PASSING, "disposition", "transfer"})

    def close(self) -> None:
        """Close the link."""
        self.detach(closed=True)


def _address(answer: dict[str, Any], terminus: str) -> str:
    found = answer.get(terminus)
    address = found.fields.get("address") if isinstance(found, CompositeValue) else None
    require(isinstance(address, str), f"the {terminus} is answered without an address")
    return str(address)
