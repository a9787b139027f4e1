"""One request of a user to a page: the session, the types that the broker describes, and the token of its forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from msgspec import Struct
from starlette.requests import Request

from amqp_rt.container.managing import ManagementClient
from amqp_rt.errors import AmqpError

from ..deleting import delete
from ..sessions import WebSession
from .kinds import CONTAINER

#: Notices that wait for the next page of a session, and characters of each.
_NOTICES_MAX: Final = 5
_NOTICE_MAX: Final = 500


class TypeDescriptions(Struct, frozen=True):
    """Management types as the broker describes them, each after its name."""

    attributes: Mapping[str, Sequence[str]]
    operations: Mapping[str, Mapping[str, Sequence[str]]]
    schemas: Mapping[str, Mapping[str, Any]]


class PageStates:
    """Data that pages keep for sessions: it goes with them."""

    def __init__(self) -> None:
        self.notices: WeakKeyDictionary[WebSession, list[str]] = WeakKeyDictionary()
        self._types: WeakKeyDictionary[WebSession, TypeDescriptions] = WeakKeyDictionary()
        self._latest: TypeDescriptions | None = None

    def types_of(self, session: WebSession) -> TypeDescriptions | None:
        """Return the types as *session* has read them; None if it has not."""
        return self._types.get(session)

    def keep_types(self, session: WebSession, types: TypeDescriptions) -> TypeDescriptions:
        """Keep *types* for *session*, in one copy for all sessions that have read the same."""
        if types != self._latest:
            self._latest = types
        self._types[session] = self._latest
        return self._latest


class Visit:
    """Request of the user of *session*.

    Args:
        request: The request.
        session: The session.
        states: Data that pages keep for sessions.
        form: Texts of the form that was sent, by the names of their fields; empty for GET.
        read_only: Whether nothing may be changed over HTTP.
    """

    def __init__(
        self,
        request: Request,
        session: WebSession,
        states: PageStates,
        form: Mapping[str, str],
        *,
        read_only: bool,
    ) -> None:
        self.request = request
        self.session = session
        self.form = form
        self.read_only = read_only
        self._states = states

    @property
    def there(self) -> ManagementClient:
        """Client of ``$management``, with the rights of the user."""
        return self.session.management

    @property
    def user(self) -> str | None:
        """Name of the user."""
        return self.session.user

    @property
    def virtual_host(self) -> str:
        """Virtual host of the session."""
        return self.session.virtual_host

    @property
    def csrf(self) -> str:
        """Token for forms."""
        return self.session.csrf

    def query(self, name: str, default: str = "") -> str:
        """Return the parameter *name* of the address."""
        return self.request.query_params.get(name, default)

    def tell(self, notice: str) -> None:
        """Show *notice* on the next page of the session."""
        waiting = self._states.notices.setdefault(self.session, [])
        waiting.append(notice[:_NOTICE_MAX])
        del waiting[:-_NOTICES_MAX]

    def take_notices(self) -> list[str]:
        """Return the notices for this page, which no other one shows."""
        return self._states.notices.pop(self.session, [])

    async def types(self) -> TypeDescriptions:
        """Return the types of the broker, which are read once for each session.

        Raises:
            AmqpError: The user has no right at all at ``$management``.
        """
        known = self._states.types_of(self.session)
        if known is None:
            there = self.there
            read = TypeDescriptions(
                await there.attributes(),
                await there.operations(),
                (await there.request("GET-SCHEMA", type="org.amqp.management")).body,
            )
            known = self._states.keep_types(self.session, read)
        return known

    async def read(self, type_name: str, name: str) -> Mapping[str, Any]:
        """Return the attributes of one entity.

        Raises:
            AmqpError: There is none, or the user may not see it.
        """
        return await self.there.read(type_name, name)

    async def operate(
        self, operation: str, type_name: str, name: str, body: Any = None, **arguments: Any
    ) -> Any:
        """Perform *operation* on an entity and return the body of the reply.

        Raises:
            AmqpError: It was refused.
        """
        reply = await self.there.request(operation, body, type=type_name, name=name, **arguments)
        return reply.body

    async def delete(self, type_name: str, name: str) -> Any:
        """Delete an entity and return the body of the reply. The session may end with it.

        Raises:
            AmqpError: It was refused.
        """
        return await delete(self.request.state.door.broker, self.session, type_name, name)

    async def may_manage(self) -> bool:
        """Return whether the user has the right to manage ``$management``."""
        try:
            await self.there.page(CONTAINER, count=1)
        except AmqpError as error:
            if error.condition != "amqp:unauthorized-access":
                raise
            return False
        return True

    async def check_manages(self) -> None:
        """Check that the user may manage ``$management`` of the default virtual host, which is about all of them.

        Raises:
            AmqpError: The user may not.
        """
        if self.virtual_host or not await self.may_manage():
            raise AmqpError(
                "this page is about all virtual hosts: it takes the right to manage $management in the default one",
                condition="amqp:unauthorized-access",
            )


def url(path: str, **query: object) -> str:
    """Return *path* with *query*, without empty values; names are encoded whatever characters they have."""
    given = {key: str(value) for key, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
