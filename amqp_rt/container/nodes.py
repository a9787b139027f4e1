"""Nodes of a container, by address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..addresses import AddressError, AddressTable
from ..security.access import MANAGEMENT, reserved
from ..tallies import OTHER
from .batching import BatchWorkers
from .codecs import Codecs
from .declaring import declared
from .home import Home
from .resources import Resources
from .routes import HandlerDeclaration, Middleware, Route, Stats
from .serving import Run, Workers, run_message, run_streamed

#: Directions of links to a node of each kind: False where the peer sends, True where we do. An rpc
#: can be received from: replies without a reply-to go there.
_DIRECTIONS: Final[Mapping[str, tuple[bool, ...]]] = {
    "node": (False,),
    "rpc": (False, True),
    "source": (True,),
    "link": (False, True),
}


class Nodes:
    """Nodes by address, with separate tables for those to send to and those to receive from.

    Args:
        home: The container.
        answer: Processes one request to a node of the kind ``rpc``.
        resources: Objects that handlers may request.
        codecs: Codecs of payloads.
        middleware: Wrapped around every handler, outside of the handler's own.
    """

    def __init__(
        self,
        home: Home,
        *,
        answer: Run,
        resources: Resources,
        codecs: Codecs | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._home = home
        self._answer = answer
        self._resources = resources
        self._codecs = codecs
        self._middleware = tuple(middleware)
        #: Called with each handler before it is added; raises AddressError to refuse it.
        self.check: Callable[[Route], None] | None = None
        #: Called when the addresses of nodes have changed.
        self.on_change: Callable[[], None] | None = None
        #: Workers of all nodes, including nodes that are served at peers only.
        self.workers: list[Workers] = []
        #: Counts of nodes that have been removed, by the pattern of their addresses.
        self.retired: dict[str, Stats] = {}
        self._placed: list[Workers] = []
        self._tables: tuple[AddressTable[Workers], AddressTable[Workers]] = (
            AddressTable(),
            AddressTable(),
        )

    def __iter__(self) -> Iterator[Workers]:
        """Iterate over the nodes that have an address here, in the order in which they were added."""
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, function: Callable[..., Any], declaration: HandlerDeclaration) -> None:
        """Add a node.

        Raises:
            TypeError: The handler has a parameter that cannot be provided.
            AddressError: The address is taken.
        """
        workers = self._make(function, declaration)
        if self.check is not None:
            self.check(workers.route)
        self._place(workers)
        self.workers.append(workers)

    def _make(self, function: Callable[..., Any], declaration: HandlerDeclaration) -> Workers:
        if self._middleware:
            declaration = msgspec.structs.replace(
                declaration, middleware=(*self._middleware, *declaration.middleware)
            )
        route = Route(function, declaration, self._resources, self._codecs)
        if route.kind == "rpc":
            return Workers(route, self._home, self._answer)
        if route.batch is not None:
            return BatchWorkers(route, route.batch, self._home)
        return Workers(route, self._home, run_streamed if route.streaming else run_message)

    def _place(self, workers: Workers) -> None:
        route = workers.route
        added: list[AddressTable[Workers]] = []
        try:
            for sends in _DIRECTIONS[route.kind]:
                self._tables[sends].add(route.pattern, workers)
                added.append(self._tables[sends])
        except AddressError as error:
            for table in added:
                table.remove(route.pattern)
            raise AddressError(f"{route.name}: {error.description}") from None
        self._placed.append(workers)
        if self.on_change is not None:
            self.on_change()

    def of(self, thing: Any) -> list[Workers]:
        """Return the nodes of a function, object, router or address as it was declared."""
        functions = [] if isinstance(thing, str) else [function for function, _ in declared(thing)]
        return [
            workers
            for workers in self._placed
            if workers.route.address == thing or workers.route.function in functions
        ]

    def remove(self, workers: Workers) -> None:
        """Remove a node from its address; it stays in ``workers`` until its handlers have ended."""
        self._placed.remove(workers)
        for sends in _DIRECTIONS[workers.route.kind]:
            self._tables[sends].remove(workers.route.pattern)
        if self.on_change is not None:
            self.on_change()

    def retire(self, workers: Workers) -> None:
        """Forget a removed node, whose handlers have ended, but for its counts."""
        self.workers.remove(workers)
        address = workers.route.address
        if address not in self.retired and len(self.retired) >= self._home.limits.metrics_nodes_max:
            address = OTHER
        kept = self.retired.setdefault(address, Stats())
        for name, count in msgspec.structs.asdict(workers.route.stats).items():
            setattr(kept, name, getattr(kept, name) + count)
        kept.links = 0

    def find(
        self, address: str, *, sends: bool = False
    ) -> tuple[Workers, Mapping[str, Any]] | None:
        """Find the node at *address* and the captures of its pattern.

        Args:
            address: The address of an attach.
            sends: Whether we are the link's sender.

        Raises:
            ValueError: The address fits, but a capture cannot be converted to the handler's type.
        """
        table = self._tables[sends]
        found = table.find(address)
        if found is None and address.endswith(f"/{MANAGEMENT}"):
            # The management nodes of entities are served by that of the container.
            address = MANAGEMENT
            found = table.find(address)
        if found is None:
            return None
        workers, captures = found
        return workers, workers.route.convert(address, captures)

    def handler_at(self, address: str, *, sends: bool = False) -> Route | None:
        """Return the handler whose address or pattern fits, without converting captures."""
        found = self._tables[sends].find(address)
        return None if found is None else found[0].route

    def for_peer(self, things: Iterable[Any]) -> list[Workers]:
        """Return the nodes with which *things* are served at a peer; those that are new are created.

        Without *things*, all nodes that have an address without captures and do not handle links
        themselves, except those of this library, such as ``$management``: a peer has its own.
        """
        found: list[Workers] = []
        for thing in things:
            for function, declaration in declared(thing):
                workers = self._declared_by(function, declaration.address)
                if workers is None:
                    workers = self._make(function, declaration)
                    self.workers.append(workers)
                if workers.route.takes_items:
                    raise TypeError(
                        f"{workers.route.name}: a streamed request needs a link of its caller, and a queue has none"
                    )
                found.append(workers)
        return found or [
            each
            for each in self._placed
            if each.route.kind != "link"
            and not each.route.takes_items
            and not each.route.pattern.captures
            and not reserved(each.route.address)
        ]

    def _declared_by(self, function: Callable[..., Any], address: str) -> Workers | None:
        for each in self._placed:
            if each.route.function == function and each.route.address == address:
                return each
        return None

    @property
    def routes(self) -> list[Route]:
        """Handlers of the nodes, in the order in which they were added."""
        return [workers.route for workers in self._placed]

    def stats(self) -> dict[str, dict[str, int]]:
        """Return counts of the messages of each node, by address.

        If one address has both a node to send to and one to receive from, the key of the second has
        its kind in front: ``"source orders"``.
        """
        found: dict[str, dict[str, int]] = {}
        for workers in self._placed:
            route = workers.route
            name = f"{route.kind} {route.address}" if route.address in found else route.address
            found[name] = {**msgspec.structs.asdict(route.stats), "running": workers.running}
        return found
