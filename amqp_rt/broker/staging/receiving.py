"""Receiving end of links that stage batches of messages."""

from __future__ import annotations

from typing import ClassVar

from ...batches import MESSAGE_BATCH, read_messages
from ...errors import DecodeError
from ...fronts.base import IncomingDelivery, ReceivingLink
from ...message import MESSAGE_FORMAT
from ...outcomes import ACCEPTED, Error, Received, Rejected
from ..entries import Entry, UnacceptableMessage
from ..expiry import NEVER
from ..producers import NOT_KEPT, Producer
from ..transactions import UNKNOWN_TRANSACTION
from .batches import BATCH
from .stages import MessageStage


class StagingProducer(Producer):
    """Receiving end of a link that stages messages, single ones or batches."""

    node: MessageStage
    mixed: ClassVar[bool] = True

    def _is_single(self, delivery: IncomingDelivery) -> bool:
        return bool(delivery.message_format != MESSAGE_BATCH)

    def _deliver_other(self, link: ReceivingLink, delivery: IncomingDelivery) -> bool:
        """Stage the messages of a batch, or refuse all of them; return whether the link continues."""
        stage = self.node
        if delivery.state is not None and type(delivery.state) is not Received:
            link.detach(UNKNOWN_TRANSACTION)
            return False
        now, publisher, check = self.wall(), link.peer.container_id, self.check
        entries: list[Entry] = []
        # Whether reading the messages again later gives the same entries.
        plain = True
        refusal: Rejected | None = None
        try:
            for payload in read_messages(
                delivery.payload, self.entry_factory.limits.batch_messages_max
            ):
                entry = self.entry_factory.make_entry(payload, MESSAGE_FORMAT, now, self.ttl_s)
                if entry.durable and self.ledger is None and not self.volatile:
                    refusal = NOT_KEPT
                elif check is not None:
                    refusal = check(entry, link.peer)
                if refusal is not None:
                    break
                entry.publisher = publisher
                entries.append(entry)
                if (
                    entry.payload is not payload
                    or entry.altered
                    or entry.expires_at != NEVER
                    or entry.due is not None
                    or entry.returnable
                ):
                    plain = False
        except DecodeError as error:
            self._refuse_batch(link, delivery, Rejected(Error.of(error)))
            return True
        except UnacceptableMessage as error:
            link.detach(Error.of(error))
            return False
        if refusal is None and not self.admits(len(delivery.payload)):
            refusal = self.full(len(delivery.payload))
        if refusal is not None:
            self._refuse_batch(link, delivery, refusal)
            return True
        if any(entry.expires_at != NEVER for entry in entries):
            self.on_expiring()
        if self.ledger is None:
            for entry in entries:
                stage.put(entry)
            stage.area.note_batch(len(delivery.payload))
            delivery.settle(ACCEPTED)
            return True
        if plain:
            # Their entries can be made from the batch again when they are published. The payloads are
            # kept as marks until they are counted, which saves reading the batch again.
            marks = [entry.payload for entry in entries]
            entries = [
                Entry(delivery.payload, BATCH, durable=True, publisher=publisher, marks=marks)
            ]
        for entry in entries:
            stage.reserve(entry)
        stage.area.note_batch(len(delivery.payload))
        stage.stage(entries, [delivery])
        return True

    def _refuse_batch(
        self, link: ReceivingLink, delivery: IncomingDelivery, refusal: Rejected
    ) -> None:
        if delivery.settled:
            self._log_drop(delivery.payload, delivery.message_format, link, refusal.error)
        delivery.settle(refusal)
