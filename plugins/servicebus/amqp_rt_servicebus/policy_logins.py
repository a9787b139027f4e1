"""Logins with the name of a shared access policy and its key, for clients without tokens.

Azure accepts SASL PLAIN as an alternative to tokens: the user is the policy, the password its key, and the
connection has the rights of the policy for as long as it lasts.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from amqp_rt.addresses import wild_parts
from amqp_rt.fronts import Peer
from amqp_rt.security.mechanisms import PlainServer, Step, Success
from amqp_rt.security.tokens import Token

from .declarations import SasKey
from .tokens import rights_of_key

#: Key of policies that do not exist, so that their refusal takes as long as that of a wrong key.
_NO_KEY: Final = SasKey("-" * 44)


class PolicyLogin(PlainServer):
    """Server side of PLAIN whose users are the shared access policies of a namespace.

    Args:
        policies: Returns the policies of the namespace by name. Those of single entities do not log in.
    """

    def __init__(self, policies: Callable[[], Mapping[str, SasKey]]) -> None:
        super().__init__(self._token)
        self._policies = policies

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Verify the policy and its key, and give the connection the rights of a token."""
        step = await super().respond(response, peer)
        if isinstance(step, Success):
            return Success(step.user, tokens=(step.identity,))
        return step

    async def _token(self, name: str, password: str, peer: Peer) -> Token | None:
        found = self._policies().get(name)
        key = _NO_KEY if found is None else found
        given = password.encode()
        right = hmac.compare_digest(given, key.key.encode())
        right |= bool(key.secondary) and hmac.compare_digest(given, key.secondary.encode())
        if found is None or not right:
            return None
        grants = ((wild_parts("*"), rights_of_key(key)),)
        return Token(scope="", grants=grants, expires_at=inf, subject=name)
