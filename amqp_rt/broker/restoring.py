"""Restoring nodes, their messages and everything else from the store, when the broker starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

import msgspec

from ..errors import AmqpError, DecodeError
from ..termini import Target
from .branches.restoring import BranchRestorer
from .durable import facts
from .durable.facts import TerminusFact
from .durable.journal import Journal
from .durable.ledgers import QueueLedger
from .filtering.selectors import InvalidFilter
from .kinds.base import Node
from .nodes import split_partition
from .producers import Inlet
from .queue.queue import MessageQueue
from .services import Services
from .spaces import VirtualHosts
from .termini import Terminus
from .terms import Terms, restored_terms

_log: Final = logging.getLogger("amqp_rt.broker")


async def restore(services: Services, spaces: VirtualHosts) -> None:
    """Open the store, and restore its nodes and messages.

    Raises:
        AmqpError: The store cannot be opened, or has records unknown to this release.
    """
    journal = services.journal
    if journal is None:
        return
    await journal.open()
    await _restore_nodes(journal, spaces)
    if services.routed_addresses is not None:
        await services.routed_addresses.restore(journal)
    nodes = spaces.nodes()
    numbered = {node.number: node for node in nodes}
    await _restore_ids(journal, services, numbered)
    await _restore_facts(journal, spaces, numbered)
    await _restore_termini(journal, services, numbered)
    staged = await services.staging.producers.restore(numbered)
    leased = await services.leases.restore(numbered, partial(services.pager.fetch, journal))
    restorer = BranchRestorer(
        services.branches,
        journal,
        partial(_find_inlet, spaces),
        _queues(nodes),
        partial(services.pager.fetch, journal),
    )
    services.reserve_numbers(max(staged, leased, await restorer.restore()))
    if nodes:
        messages = sum(node.waiting for node in nodes)
        _log.info("store read: %d nodes, %d messages in queues", len(nodes), messages)


def _find_inlet(spaces: VirtualHosts, virtual_host: str, address: str) -> Inlet | None:
    """Return the inlet of the node at *address*; None if there is none."""
    found = spaces.open(virtual_host).inlet(address)
    return found if isinstance(found, Inlet) else None


def _queues(nodes: Iterable[Node]) -> dict[int, MessageQueue]:
    """Return the stored queues, and those of durable subscriptions, by their numbers in the store."""
    found: dict[int, MessageQueue] = {}
    for node in nodes:
        queues = [node.leased_queue, *(terminus.queue for terminus in node.termini)]
        for queue in queues:
            if queue is not None and isinstance(queue.ledger, QueueLedger):
                found[queue.ledger.number] = queue
    return found


async def _restore_nodes(journal: Journal, spaces: VirtualHosts) -> None:
    kinds = {kind.kind: kind.declaration for kind in spaces.kinds.values()}
    for key, value in await facts.NODES.read(journal):
        number = facts.number_of(key)
        try:
            fact = facts.NODES.decode(value)
            declared = facts.declaration_of(fact, kinds)
        except (msgspec.DecodeError, KeyError) as error:
            raise AmqpError(
                f"the store has a node that this release does not understand: {error}"
            ) from error
        space = spaces.open(fact.virtual_host)
        node = space.make(declared, number=number, implicit=fact.implicit)
        node.found = True
        await node.restore(journal)


async def _restore_ids(journal: Journal, services: Services, nodes: Mapping[int, Node]) -> None:
    """Restore the duplicate-detection windows."""
    for key, value in await facts.DUPLICATES.read(journal):
        node = nodes.get(facts.number_of(key))
        if node is not None and node.intake.duplicates is not None:
            node.intake.duplicates.restore(key, value)
        else:
            facts.DUPLICATES.remove(journal.loose, key)
    for duplicates in services.windows:
        duplicates.expire()


async def _restore_facts(journal: Journal, spaces: VirtualHosts, nodes: Mapping[int, Node]) -> None:
    """Restore the facts that each kind of node stores itself."""
    for of_kind in spaces.kinds.values():
        for kind in of_kind.fact_kinds:
            for key, value in await kind.read(journal):
                node = nodes.get(facts.number_of(key))
                if node is not None and kind in node.fact_kinds:
                    node.restore_fact(kind, key, kind.decode(value))
                else:
                    # The node was deleted while this fact was being written.
                    kind.remove(journal.loose, key)
    for node in nodes.values():
        node.restored()


async def _restore_termini(journal: Journal, services: Services, nodes: Mapping[int, Node]) -> None:
    known: dict[int, Terminus] = {}
    for key, value in await facts.TERMINI.read(journal):
        number = facts.number_of(key)
        services.reserve_numbers(number)
        try:
            fact = facts.TERMINI.decode(value)
            node = nodes.get(fact.node)
            if node is not None:
                known[number] = await _restore_terminus(journal, node, fact, number)
                continue
        except (msgspec.DecodeError, DecodeError, InvalidFilter) as error:
            raise AmqpError(
                f"the store has a terminus that this release does not understand: {error}"
            ) from error
        facts.TERMINI.remove(journal.loose, key)
    for key, value in await facts.DELIVERIES.read(journal):
        source = known.get(facts.number_of(key))
        sequence = facts.DELIVERIES.decode(value)
        queue = None if source is None else source.unsettled_queue
        if queue is not None:
            await services.pager.fetch(journal, queue, sequence)
        if source is None or not source.restore_delivery(facts.part_of(key), sequence):
            facts.DELIVERIES.remove(journal.loose, key)
    seen: dict[int, dict[bytes, tuple[int, bytes]]] = {}
    for key, value in await facts.SEEN.read(journal):
        seen.setdefault(facts.number_of(key), {})[key] = facts.SEEN.decode(value)
    for number, values in seen.items():
        target = known.get(number)
        if target is None or not target.restore_tags(values.values()):
            # A later terminus with this number must not take messages for duplicates of these.
            for key in values:
                facts.SEEN.remove(journal.loose, key)
    for terminus in known.values():
        # The connection of its link ended with the process before.
        terminus.start_countdown()


async def _restore_terminus(
    journal: Journal, node: Node, fact: TerminusFact, number: int
) -> Terminus:
    services = node.services
    kept = facts.terminus_of(fact)
    found = split_partition(kept.address or "")
    if found is not None:
        # The record of a partition's terminus refers to the log.
        node = node.part(str(kept.address), found[1]) or node
    key = services.termini.restored_key(fact, kept)
    if isinstance(kept, Target):
        terms = Terms(source=None, target=kept, snd_settle_mode=fact.snd_settle_mode, keeps=True)
    else:
        terms = restored_terms(
            kept,
            fact.snd_settle_mode,
            fact.container_id,
            priority=fact.priority,
            exclusive=fact.exclusive,
            now=services.clock.wall(),
            limits=services.limits,
            types=services.filters,
        )
    terminus = node.open_terminus(key, terms, number)
    await node.restore_subscription(journal, terminus)
    terminus.restored()
    return terminus
