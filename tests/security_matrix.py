"""Tables of ``docs/security-matrix.md``: which logins succeed, and which operations rights allow.

``security/test_security_matrix.py`` proves every cell against a live broker. To add a protocol, add a key to
:data:`RIGHTS_OF`, with its operations in that module's ``OPERATIONS``; to add a transport or a mechanism, add
a row here.
"""

from __future__ import annotations

from typing import Final

# --- logins ----------------------------------------------------------------------------------------

TRANSPORTS: Final = ("tcp", "tls", "ws", "wss")
#: Transports that encrypt the connection.
ENCRYPTED: Final = ("tls", "wss")
MODES: Final = ("required", "optional", "off")
CREDENTIALS: Final = ("good", "bad", "unknown", "empty", "expired")

NOT_OFFERED: Final = "not offered"
REFUSED: Final = "refused"
TLS_REFUSED: Final = "refused by TLS"
NO_SASL: Final = "no SASL there"
MUST_LOG_IN: Final = "must log in"
ADA: Final = "in as ada"
NOBODY: Final = "in as nobody"

#: mechanism → credentials → outcome, where the mechanism is offered. Credentials not listed do not exist for
#: the mechanism: it has nothing that could be bad, or expire.
LOGINS: Final[dict[str, dict[str, str]]] = {
    "PLAIN": {"good": ADA, "bad": REFUSED, "unknown": REFUSED, "empty": REFUSED},
    "SCRAM-SHA-1": {"good": ADA, "bad": REFUSED, "unknown": REFUSED, "empty": REFUSED},
    "SCRAM-SHA-256": {"good": ADA, "bad": REFUSED, "unknown": REFUSED, "empty": REFUSED},
    "SCRAM-SHA-512": {"good": ADA, "bad": REFUSED, "unknown": REFUSED, "empty": REFUSED},
    "EXTERNAL": {
        "good": ADA,
        "bad": TLS_REFUSED,
        "unknown": NOT_OFFERED,
        "empty": REFUSED,
        "expired": TLS_REFUSED,
    },
    "OAUTHBEARER": dict.fromkeys(CREDENTIALS, REFUSED) | {"good": ADA},
    "XOAUTH2": dict.fromkeys(CREDENTIALS, REFUSED) | {"good": ADA},
    "AMQPCBS": dict.fromkeys(CREDENTIALS, REFUSED) | {"good": NOBODY},
    "MSSBCBS": {"good": NOBODY},
    "ANONYMOUS": {"good": NOBODY},
    "none": {"good": NOBODY},
}
#: Meanings of the credentials' names for each mechanism.
MEANINGS: Final = {
    "PLAIN, SCRAM": "*unknown* is a user that is not there, *empty* an empty password",
    "EXTERNAL": "*bad* is a certificate of an authority that is not believed, *unknown* no "
    "certificate, *empty* one that names nobody",
    "OAUTHBEARER, XOAUTH2": "*bad* is a token with a wrong signature, *unknown* a good one with "
    "another user's name, *empty* no token",
    "AMQPCBS": "*bad* is a token with a wrong signature, *unknown* one for another audience, *empty* "
    "no token",
    "MSSBCBS": "tokens follow on `$cbs`; until then nothing else is there",
    "none": "the client leaves the SASL layer out",
}
#: Mechanisms that reveal a secret, or depend on a certificate: over networks, offered on encrypted ones only.
ONLY_ENCRYPTED: Final = frozenset(
    {"PLAIN", "EXTERNAL", "OAUTHBEARER", "XOAUTH2", "AMQPCBS", "MSSBCBS"}
)


def outcome_of_login(mechanism: str, transport: str, mode: str, credentials: str) -> str | None:
    """Return the outcome of a login from another machine; None if the combination does not exist."""
    said = LOGINS[mechanism].get(credentials)
    encrypted = transport in ENCRYPTED
    if said is None or (said == TLS_REFUSED and encrypted):
        return said
    if mechanism == "none":
        return MUST_LOG_IN if mode == "required" else said
    if mode == "off":
        return NO_SASL
    if mechanism in ONLY_ENCRYPTED and not encrypted:
        return NOT_OFFERED
    return said


# --- rights ----------------------------------------------------------------------------------------

#: Rights of a user at the node ``q``: none anywhere, some elsewhere, or one there.
RIGHTS: Final = ("nothing", "elsewhere", "send", "listen", "manage")
#: Origins of a right.
SOURCES: Final = ("rule", "token")

ALLOWED: Final = "allowed"
_DENIED: Final = "amqp:unauthorized-access"


def _by(**allowed_or: str) -> dict[str, str]:
    return {right: allowed_or.get(right, _DENIED) for right in RIGHTS}


_SENDERS: Final = _by(send=ALLOWED, manage=ALLOWED)
_LISTENERS: Final = _by(listen=ALLOWED, manage=ALLOWED)
_MANAGERS: Final = _by(manage=ALLOWED)
_ASKERS: Final = _by(send=ALLOWED, listen=ALLOWED, manage=ALLOWED)
_NOBODY: Final = dict.fromkeys(RIGHTS, _DENIED)
_SOMEBODY: Final = dict.fromkeys(RIGHTS, ALLOWED) | {"nothing": _DENIED}
#: Users who manage a node may send requests; the status refuses those about other nodes.
_NOT_THEIRS: Final = _by(manage="403")

#: Protocols that only some transports carry, and those without tokens.
CARRIED_BY: Final = {"AMQP 0-9-1": ("tcp", "tls"), "AMQP 0-10": ("tcp", "tls")}
WITHOUT_TOKENS: Final = ("AMQP 0-9-1", "AMQP 0-10")
#: protocol → operation → right → outcome.
RIGHTS_OF: Final[dict[str, dict[str, dict[str, str]]]] = {
    "AMQP 1.0": {
        "attach a link that sends to q": _SENDERS,
        "attach a link that receives from q": _LISTENERS,
        "attach a link that browses q": _LISTENERS,
        "attach a link that sends to an alias of q": _SENDERS,
        "attach a link that receives from an alias of q": _LISTENERS,
        "attach a link to a node that is not there": dict.fromkeys(RIGHTS, _DENIED),
        "attach to a dynamic node": _SOMEBODY,
        "attach to the anonymous terminus": _SOMEBODY,
        "send to q by the anonymous terminus": _SENDERS,
        "send to an alias of q by the anonymous terminus": _SENDERS,
        "ask for transactions": _SOMEBODY,
        "post to q in a transaction": _SENDERS,
        "post to q in a transaction, by the anonymous terminus": _SENDERS,
        "receive from q in a transaction": _LISTENERS,
    },
    "AMQP 0-9-1": {
        "declare q": _MANAGERS,
        "declare q passively": _by(send=ALLOWED, listen=ALLOWED, manage=ALLOWED),
        "declare passively what is not there": dict.fromkeys(RIGHTS, _DENIED),
        "delete what is not there": dict.fromkeys(RIGHTS, _DENIED),
        "declare another queue": dict.fromkeys(RIGHTS, _DENIED),
        "declare a queue without a name": dict.fromkeys(RIGHTS, _DENIED),
        "declare an exchange": dict.fromkeys(RIGHTS, _DENIED),
        "bind q to an exchange of others": dict.fromkeys(RIGHTS, _DENIED),
        "purge q": _MANAGERS,
        "delete q": _MANAGERS,
        "publish to q": _SENDERS,
        "publish to an exchange of others": dict.fromkeys(RIGHTS, _DENIED),
        "publish to q in a transaction": _SENDERS,
        "ask for transactions": _SOMEBODY,
        "consume from q": _LISTENERS,
        "get from q": _LISTENERS,
        "declare an alias of q passively": _by(send=ALLOWED, listen=ALLOWED, manage=ALLOWED),
        "purge an alias of q": _MANAGERS,
        "publish to an alias of q": _SENDERS,
        "get from an alias of q": _LISTENERS,
    },
    "AMQP 0-10": {
        "declare q": _MANAGERS,
        "declare q passively": _ASKERS,
        "declare passively what is not there": _NOBODY,
        "declare another queue": _NOBODY,
        "declare an exchange": _NOBODY,
        "declare an exchange of others passively": _NOBODY,
        "bind q to an exchange of others": _NOBODY,
        "unbind q from an exchange of others": _NOBODY,
        "purge q": _MANAGERS,
        "delete q": _MANAGERS,
        "delete a queue that is not there": _NOBODY,
        "delete an exchange that is not there": _NOBODY,
        "query q": _ASKERS,
        "query a queue that is not there": _NOBODY,
        "query an exchange of others": _NOBODY,
        "ask for the bindings of q": _ASKERS,
        "ask for the bindings of an exchange of others": _NOBODY,
        "publish to q": _SENDERS,
        "publish to q in fragments": _SENDERS,
        "publish to an exchange of others": _NOBODY,
        "resume a message to an exchange of others": _NOBODY,
        "publish to q in a transaction": _SENDERS,
        "publish to q in a branch": _SENDERS,
        "ask for transactions": _SOMEBODY,
        "ask for distributed transactions": _SOMEBODY,
        "ask for prepared branches": _SOMEBODY,
        "subscribe to q": _LISTENERS,
        "subscribe to q in a transaction": _LISTENERS,
        "subscribe to q in a branch": _LISTENERS,
        "browse q": _LISTENERS,
        "acquire a message of q": _LISTENERS,
        "declare an alias of q passively": _ASKERS,
        "query an alias of q": _ASKERS,
        "purge an alias of q": _MANAGERS,
        "publish to an alias of q": _SENDERS,
        "subscribe to an alias of q": _LISTENERS,
    },
    "AMQP Management": {
        "READ q": _MANAGERS,
        "UPDATE q": _MANAGERS,
        "PEEK at q": _MANAGERS,
        "PURGE q": _MANAGERS,
        "DELETE q": _MANAGERS,
        "CREATE q": _MANAGERS,
        "MOVE from q to a node of others": _NOT_THEIRS,
        "READ a node of others": _NOT_THEIRS,
        "CREATE a node of others": _NOT_THEIRS,
        "READ the container": _NOT_THEIRS,
        "DELETE a connection": _NOT_THEIRS,
        "QUERY": _MANAGERS,
    },
}


# --- namespaces of Service Bus ---------------------------------------------------------------------

_SENDS: Final = _by(send=ALLOWED, manage=ALLOWED)
_LISTENS: Final = _by(listen=ALLOWED, manage=ALLOWED)
#: A client with any right at an entity may send requests to its management node, whose status refuses those that need
#: another right.
_ASKS: Final = dict.fromkeys(RIGHTS, "403") | {
    "nothing": _DENIED,
    "elsewhere": _DENIED,
    "manage": ALLOWED,
}
_ASKS_TO_SEND: Final = _ASKS | {"send": ALLOWED}
_ASKS_TO_LISTEN: Final = _ASKS | {"listen": ALLOWED}
_ADMINISTERS: Final = dict.fromkeys(RIGHTS, "401") | {"manage": ALLOWED}
#: operation → right of a key at the entity ``q`` → outcome. ``plugins/servicebus/tests/test_rights_of_namespaces.py``
#: proves it, for keys of the namespace and keys of the entity.
RIGHTS_IN_NAMESPACES: Final[dict[str, dict[str, str]]] = {
    "attach a link that sends to q": _SENDS,
    "attach a link that receives from q": _LISTENS,
    "attach a link that receives dead letters of q": _LISTENS,
    **dict.fromkeys(
        (
            *("peek-message", "batch-delete-messages", "receive-by-sequence-number", "renew-lock"),
            *("update-disposition", "renew-session-lock", "get-session-state"),
            *("set-session-state", "get-message-sessions"),
        ),
        _ASKS_TO_LISTEN,
    ),
    **dict.fromkeys(("schedule-message", "cancel-scheduled-message"), _ASKS_TO_SEND),
    **dict.fromkeys(("add-rule", "remove-rule", "enumerate-rules"), _ASKS),
    "GET q over HTTP": _ADMINISTERS,
    "PUT q over HTTP": _ADMINISTERS,
    "DELETE q over HTTP": _ADMINISTERS,
    "list the queues over HTTP": _ADMINISTERS,
}


# --- listeners for RabbitMQ's clients ---------------------------------------------------------------

#: Requests to ``/management``: a client with any right at all may send them, and the status judges each.
_MANAGES_ONLY: Final = dict.fromkeys(RIGHTS, "403") | {"nothing": _DENIED, "manage": ALLOWED}
_ASKS_ABOUT_IT: Final = _MANAGES_ONLY | {"send": ALLOWED, "listen": ALLOWED}
_OF_OTHERS: Final = dict.fromkeys(RIGHTS, "403") | {"nothing": _DENIED}
#: operation → right at the queue ``q`` → outcome. ``plugins/rabbitmq/tests/test_rights_of_rabbitmq.py`` proves it.
RIGHTS_AT_RABBITMQ: Final[dict[str, dict[str, str]]] = {
    "attach the links to /management": _SOMEBODY,
    "PUT /queues/q": _MANAGES_ONLY,
    "PUT /queues/another": _OF_OTHERS,
    "GET /queues/q": _ASKS_ABOUT_IT,
    "GET /queues/not-there": _OF_OTHERS,
    "DELETE /queues/q": _MANAGES_ONLY,
    "DELETE /queues/not-there": _OF_OTHERS,
    "DELETE /queues/q/messages": _MANAGES_ONLY,
    "PUT /exchanges/another": _OF_OTHERS,
    "DELETE /exchanges/others": _OF_OTHERS,
    "DELETE /exchanges/not-there": _OF_OTHERS,
    "POST /bindings of q to an exchange of others": _OF_OTHERS,
    "GET /bindings of q to an exchange of others": _OF_OTHERS,
    "DELETE /bindings/… of q to an exchange of others": _OF_OTHERS,
    "DELETE /bindings/… with arguments, of q to an exchange of others": _OF_OTHERS,
    "attach a publisher to /queues/q": _SENDERS,
    "attach a publisher to /exchanges/others": _NOBODY,
    "attach a consumer to /queues/q": _LISTENERS,
    "attach a consumer for replies": _SOMEBODY,
    "publish to q by its address in the message": _SENDERS,
}


# --- the HTTP door ---------------------------------------------------------------------------------

#: Requests about the queue ``q``, which take the right to manage it; those to ``$management`` need any at all.
_OVER_HTTP: Final = dict.fromkeys(RIGHTS, "403")
_MANAGE_OVER_HTTP: Final = _OVER_HTTP | {"manage": ALLOWED}
#: request → right at the queue ``q`` → outcome. ``plugins/console/tests/test_http_rights.py`` proves it.
RIGHTS_OVER_HTTP: Final[dict[str, dict[str, str]]] = {
    "GET /session": dict.fromkeys(RIGHTS, ALLOWED),
    "GET /nodes": _MANAGE_OVER_HTTP | {"elsewhere": ALLOWED},
    "GET /nodes/q": _MANAGE_OVER_HTTP,
    "GET /nodes/other": _OVER_HTTP,
    "GET /nodes/q/peek": _MANAGE_OVER_HTTP,
    "GET /messages of other": _OVER_HTTP,
    "POST /nodes/q/publish": _MANAGE_OVER_HTTP | {"send": ALLOWED},
    "POST /nodes/other/publish": _OVER_HTTP,
    "POST /nodes/q/move to other": _OVER_HTTP,
    "POST /nodes/q/purge": _MANAGE_OVER_HTTP,
    "PATCH /nodes/q": _MANAGE_OVER_HTTP,
    "PATCH /nodes/q with dead letters to other": _OVER_HTTP,
    "PUT /nodes/another": _OVER_HTTP,
    "DELETE /nodes/q": _MANAGE_OVER_HTTP,
    "GET /connections": _OVER_HTTP,
    "DELETE /connections/1": _OVER_HTTP,
    "PUT /users/new": _OVER_HTTP,
    "GET /rules": _OVER_HTTP,
    "GET /termini": _OVER_HTTP,
    "GET /journal": _OVER_HTTP,
    "GET /access": _OVER_HTTP,
}


# --- meshes ------------------------------------------------------------------------------------------

NOT_JOINED: Final = "not joined"
DROPPED: Final = "dropped"
_JOINS: Final = dict.fromkeys(RIGHTS, NOT_JOINED)
_MEMBERS: Final = dict.fromkeys(RIGHTS, "amqp:not-allowed")
_OFFERED: Final = dict.fromkeys(RIGHTS, DROPPED)
#: operation → right at ``$mesh`` of the login of a container, which names itself as its login → outcome.
#: ``security/test_rights_in_a_mesh.py`` proves these, and those of edges.
RIGHTS_AT_MESH: Final[dict[str, dict[str, str]]] = {
    "join as an interior member": _JOINS | {"manage": ALLOWED},
    "join as an edge": _JOINS | {"send": ALLOWED, "manage": ALLOWED},
    "join under another name than that of the login": _JOINS,
    "join a mesh of another name": _JOINS,
    "offer an address, as an interior member": _OFFERED | {"manage": ALLOWED},
    "send records to $mesh, as an interior member": _MEMBERS | {"manage": ALLOWED},
    "send records to $mesh, as an edge": _MEMBERS | {"send": ALLOWED, "manage": ALLOWED},
    "send records to $mesh, as a client": _MEMBERS,
    "receive from $mesh, as an interior member": _MEMBERS,
    "attach a link along a route, as an interior member": _MEMBERS | {"manage": ALLOWED},
    "attach a link along a route, as an edge": _MEMBERS,
    "attach a link along a route, as a client": _MEMBERS,
}
#: operation → right at ``q`` of an edge, which may send to ``$mesh`` → outcome.
RIGHTS_OF_EDGES: Final[dict[str, dict[str, str]]] = {
    "offer q": _OFFERED | {"listen": ALLOWED, "manage": ALLOWED},
    "offer a pattern that matches q and others": _OFFERED,
    "offer an address that begins with $": _OFFERED,
    "attach a link that sends to q": _SENDERS,
    "attach a link that receives from q": _LISTENERS,
    # The refused link of the edge to its uplink has no credit.
    "send to q by the anonymous terminus": dict.fromkeys(RIGHTS, "released")
    | {"send": ALLOWED, "manage": ALLOWED},
}


# --- edge processes ----------------------------------------------------------------------------------

#: Attempts at a broker with ``--edges`` → outcome. ``security/test_edge_identities.py`` proves these.
AT_EDGES: Final[dict[str, str]] = {
    "connect to a socket between broker and edge": "none has a name",
    "say in clear what an edge would say of ada's certificate": REFUSED,
    "say it within TLS": REFUSED,
    "name another address by the PROXY protocol": REFUSED,
    "log in with EXTERNAL and no certificate": NOT_OFFERED,
    "log in with EXTERNAL and ada's certificate": ADA,
}


# --- rights at destinations ------------------------------------------------------------------------

#: Rights at the queue ``q`` and the exchange ``q``, of a user who manages the queue ``mine`` and the
#: exchange ``mine``.
RIGHTS_THERE: Final = ("nothing", "send", "listen", "manage")


def _there(refused: str, *allowed: str) -> dict[str, str]:
    return {right: ALLOWED if right in allowed else refused for right in RIGHTS_THERE}


#: protocol → declaration → right at q → outcome.
PASSAGES_OF: Final[dict[str, dict[str, dict[str, str]]]] = {
    "AMQP Management": {
        "CREATE a queue with dead_letter q": _there("403", "send", "manage"),
        "CREATE a queue with dead_letter q, which is not there": _there("403", "manage"),
        "CREATE a queue with the exchange q as dead_letter": _there("403", "send", "manage"),
        "CREATE a queue with the alias q": _there("403", "manage"),
        "CREATE a topic with the alias q": _there("403", "manage"),
        "CREATE a log with the alias q": _there("403", "manage"),
        "UPDATE mine to dead_letter q": _there("403", "send", "manage"),
        "UPDATE mine to the alias q": _there("403", "manage"),
        "MOVE from mine to q": _there("403", "manage"),
        "MOVE from q to mine": _there("403", "manage"),
    },
    "AMQP 0-9-1": {
        "declare a queue with dead letters to q": _there(_DENIED, "send", "manage"),
        "declare a queue with dead letters to q, which is not there": _there(_DENIED, "manage"),
        "declare a queue with dead letters to the exchange q": _there(_DENIED, "send", "manage"),
        "declare a queue with dead letters to any queue": _there(_DENIED),
        "declare an exchange with the alternate exchange q": _there(_DENIED, "send", "manage"),
        "bind mine to the exchange q": _there(_DENIED, "listen", "manage"),
        "bind q to the exchange mine": _there(_DENIED, "manage"),
        "unbind q from the exchange mine": _there(_DENIED, "manage"),
        "bind the exchange mine to the exchange q": _there(_DENIED, "listen", "manage"),
        "bind the exchange q to the exchange mine": _there(_DENIED, "manage"),
    },
    "AMQP 0-10": {
        "declare a queue with the alternate exchange q": _there(_DENIED, "send", "manage"),
        "declare an exchange with the alternate exchange q": _there(_DENIED, "send", "manage"),
        "bind mine to the exchange q": _there(_DENIED, "listen", "manage"),
        "bind q to the exchange mine": _there(_DENIED, "manage"),
        "unbind q from the exchange mine": _there(_DENIED, "manage"),
    },
}
