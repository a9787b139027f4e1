"""Links of ``@node.link`` in containers with observers."""

from __future__ import annotations

from typing import Any

from ..observers import UnreadObserver
from .feeding import LinkHandler, ServedReceiver, ServedSender
from .observed import ObservedReceipt, ObservedReceiving, ObservedSending
from .routes import RouteBinding


class ObservedServedSender(ObservedSending, ServedSender):
    """Observed sender on a link that the peer attached."""

    def __init__(self, handler: LinkHandler, binding: RouteBinding) -> None:
        ServedSender.__init__(self, handler, binding)
        self._receipts = self._own_receipts = ObservedReceipt

    def _bind_observer(self) -> UnreadObserver | None:
        return self.binding.observe("send")


class ObservedServedReceiver(ObservedReceiving, ServedReceiver):
    """Observed receiver on a link that the peer attached."""

    def __init__(self, handler: LinkHandler, binding: RouteBinding) -> None:
        ServedReceiver.__init__(self, handler, binding)

    def _begin(self, link: Any) -> None:
        super()._begin(link)
        self._observer = self.binding.observe("receive")
        self._settling = self.binding.observe("settle")


class ObservedLinkHandler(LinkHandler):
    """Handler of a ``@node.link``, whose messages observers hear of."""

    def receive(self) -> ServedReceiver:
        """Create the endpoint of a link on which the peer sends."""
        self.handle = handle = ObservedServedReceiver(self, self.binding)
        return handle

    def send(self) -> ServedSender:
        """Create the endpoint of a link on which the peer receives."""
        self.handle = handle = ObservedServedSender(self, self.binding)
        return handle
