"""The public names. A change to this list is a change that users see, so it shows in review."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import amqp_rt
from amqp_rt.broker import building

#: Package → names that it exports. A package that exports nothing has no line.
PUBLIC: dict[str, set[str]] = {
    "amqp_rt.fronts": {
        *("ACCEPTED", "Accepted", "AmqpError", "AttachRequested", "Byte", "Char", "Closed"),
        *("ConnectionFailed", "Coordinator", "DEFAULT_LIMITS", "Declare", "Declared", "Discharge"),
        *(
            "Error",
            "Event",
            "Exchange",
            "Float32",
            "Front",
            "Host",
            "Int",
            "LastingFront",
            "Limits",
        ),
        *("IncomingDelivery", "OutgoingDelivery", "ReceivingLink", "SendingLink"),
        *(
            "RECEIVER",
            "SENDER",
            "LocalProtocolError",
            "LoginRequested",
            "Message",
            "Modified",
            "Opened",
            "Outcome",
        ),
        *("Payload", "Peer", "ProtocolEngine", "QueueDeclaration", "QueueState", "RELEASED"),
        *(
            "ReceivingEndpoint",
            "Rejected",
            "Released",
            "SendingEndpoint",
            "ServerEngine",
            "ServerOptions",
        ),
        *("Short", "Source", "Symbol", "Target", "Timestamp", "Topology", "TransactionalState"),
        *("TransactionBranches", "XID_PART_MAX", "XaStatus", "Xid"),
        "BindingMatch",
        "LinksMoved",
        *("TRACINGS", "TraceMask", "TraceReader", "TracedFrame", "Tracing"),
        *("UByte", "UInt", "ULong", "UShort", "Unsettled", "UnsettledMap", "rejected"),
    },
    "amqp_rt.policies": {
        *("Breaker", "Bulkhead", "Cache", "CacheKey", "Hedge", "Policy", "Retry", "is_failure"),
    },
    "amqp_rt": {
        "COMPILED",
        "__version__",
        "Access",
        "Anonymous",
        "CbsLogin",
        "Login",
        "OAuthBearer",
        "XOAuth2",
        "Scram",
        "Users",
        "Batch",
        "BearerToken",
        "Breaker",
        "Broker",
        "Bulkhead",
        "Cache",
        "Hedge",
        "Retry",
        "ClientTls",
        "Cbs",
        "Connection",
        "Container",
        "Deadline",
        "Delivery",
        "DeliveryLogs",
        "Depends",
        "External",
        "Jwt",
        "Limits",
        "Message",
        "Modify",
        "Peer",
        "PerMessage",
        "Plain",
        "Profile",
        "Reconnect",
        "Receiver",
        "Reject",
        "Release",
        "Rights",
        "Router",
        "Rule",
        "Sas",
        "SasKey",
        "SasKeys",
        "Sender",
        "ProxyProtocol",
        "ServerTls",
        "Swt",
        "Transaction",
        "connect",
        "cron",
        "every",
        "node",
        "rpc",
        "source",
        "stream",
    },
    "amqp_rt.testing": {
        "FrontClient",
        "LoopbackBroker",
        "Replayed",
        "Script",
        "ScriptFailed",
        "Trace",
        "VirtualAmqp",
        "assert_honest",
        "check_front",
        "check_store",
        "read_trace",
        "record",
        "replay",
    },
    "amqp_rt.mesh": {
        "Bridge",
        "Mesh",
        "MeshError",
        "MeshInstance",
        "MeshMemberState",
        "MeshRule",
        "MeshStats",
        "GIVES",
        "LINK_ROUTED",
        "Offer",
        "PATTERN",
        "Pull",
        "Push",
        "TAKES",
    },
    "amqp_rt.outbox": {
        "Database",
        "NodeInbox",
        "Outbox",
        "Refused",
        "SqlInbox",
        "SqlOutbox",
        "SqliteOutbox",
        "Work",
    },
    "amqp_rt.broker": {"AddOn", "Broker", "LifeCycles", "Log", "Queue", "Schedule", "Topic"},
}


def packages() -> list[str]:
    found = pkgutil.walk_packages(amqp_rt.__path__, "amqp_rt.")
    return ["amqp_rt", *(info.name for info in found if info.ispkg)]


@pytest.mark.parametrize("name", packages())
def test_a_package_exports_what_the_list_says(name: str) -> None:
    package = importlib.import_module(name)
    exported = getattr(package, "__all__", [])

    assert set(exported) == PUBLIC.get(name, set())
    assert len(exported) == len(set(exported))
    for public in exported:
        assert getattr(package, public) is not None
        assert public in dir(package)


def test_parts_for_nodes_of_plugins_are_exported_by_one_module() -> None:
    exported = set(building.__all__)
    assert exported >= {
        *(
            "Arrived",
            "Counts",
            "Duplicates",
            "Enlisted",
            "Entry",
            "EntryFactory",
            "Inlet",
            "Intake",
        ),
        *("LogReader", "Memory", "MessageView", "Place", "Producer", "Subscription", "Transaction"),
        *("Position", "Transactions", "UnacceptableMessage", "event_hubs_position", "exceeds_link"),
    }
    assert all(getattr(building, name) is not None for name in exported)


def test_lazy_names_are_repeated_for_type_checkers() -> None:
    """``_HOMES`` serves the interpreter, the imports under TYPE_CHECKING serve mypy and editors."""
    tree = ast.parse(Path(amqp_rt.__file__).read_text("utf-8"))
    seen = {
        alias.asname or alias.name: f"amqp_rt.{node.module}"
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == amqp_rt._HOMES
    assert set(amqp_rt._HOMES) == set(amqp_rt.__all__) - {"COMPILED", "__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'amqp_rt' has no attribute 'Nobody'"):
        _ = amqp_rt.Nobody
