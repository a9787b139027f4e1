"""Options of ``amqp-rt serve`` by which a broker joins a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import parse_qsl

import click
import msgspec
from msgspec import Struct

from ..broker.broker import Broker
from ..config_files import suggestion
from ..errors import AmqpError
from ..net.tls import ClientTls
from .environment import SecretOption

if TYPE_CHECKING:
    # Imported where a mesh is asked for: most brokers are alone, and start faster without.
    from ..mesh import MeshRule

F = TypeVar("F", bound=Callable[..., Any])


class MeshOptions(Struct, frozen=True):
    """The mesh that a broker joins; None of it without ``--mesh`` and ``--mesh-name``."""

    seeds: tuple[str, ...]
    name: str | None
    zone: str
    role: Literal["auto", "interior", "edge"]
    rules: tuple[MeshRule, ...]
    direct: bool
    tls: ClientTls | None

    def member(self, broker: Broker) -> AbstractAsyncContextManager[object]:
        """Return the block in which *broker*, which listens, is a member.

        Raises:
            click.UsageError: An option cannot be used.
        """
        if not self.seeds and self.name is None:
            return nullcontext()
        from ..mesh import Mesh

        try:
            return Mesh(
                broker.container,
                self.seeds,
                name=self.name or "mesh",
                zone=self.zone,
                role=self.role,
                rules=self.rules,
                direct=self.direct,
                dial={} if self.tls is None else {"tls": self.tls},
            )
        except AmqpError as error:
            raise click.BadParameter(error.description, param_hint="--mesh") from None
        except ValueError as error:
            raise click.UsageError(f"{error}: give another --name") from None


def mesh_options(command: F) -> F:
    """Add the options of the mesh to a command, which gets them as ``joining``."""

    @wraps(command)
    def with_mesh(
        *args: Any,
        seeds: tuple[str, ...],
        mesh_name: str | None,
        zone: str,
        mesh_role: Literal["auto", "interior", "edge"],
        mesh_rules: tuple[str, ...],
        mesh_direct: bool,
        **options: Any,
    ) -> Any:
        given = zone or mesh_rules or mesh_direct or mesh_role != "auto"
        if not seeds and mesh_name is None and given:
            raise click.UsageError(
                "which mesh? --zone, --mesh-role, --mesh-direct and --mesh-rule go with --mesh SEED, or with "
                "--mesh-name for its first member"
            )
        if mesh_direct and mesh_role != "interior":
            raise click.UsageError(
                "--mesh-direct is for interior members: give --mesh-role interior as well"
            )
        joining = MeshOptions(
            *(seeds, mesh_name, zone, mesh_role, tuple(map(rule_of, mesh_rules)), mesh_direct),
            _own_tls(options),
        )
        return command(*args, joining=joining, **options)

    with_options = with_mesh
    for option in (
        click.option(
            "--mesh-rule",
            "mesh_rules",
            metavar="ADDRESS[?OPTIONS]",
            multiple=True,
            help="How members treat addresses, such as 'audit/*?distribution=multicast' or "
            "'jobs?route=link'; the first that matches holds. Give all members the same. Repeatable.",
        ),
        click.option(
            "--mesh-role",
            type=click.Choice(["auto", "interior", "edge"]),
            default="auto",
            show_default=True,
            help="interior passes on links of others, edge only uses the mesh; auto is interior if other "
            "machines can connect.",
        ),
        click.option(
            "--mesh-direct",
            is_flag=True,
            help="Connect with destinations in use, so that their messages pass no other member.",
        ),
        click.option(
            "--zone",
            metavar="ZONE",
            default="",
            help="Zone of this member, such as that of a data center; destinations in it are preferred.",
        ),
        click.option(
            "--mesh-name",
            metavar="NAME",
            help="Name of the mesh, 'mesh' by default. Alone it starts one, without other members.",
        ),
        click.option(
            "--mesh",
            "seeds",
            cls=SecretOption,
            metavar="SEED",
            multiple=True,
            help="Join a mesh that a member at SEED belongs to: a URL, dns+a://HOST:PORT for all addresses of a "
            "name, such as a headless service, or dns+srv://_amqps._tcp.NAME. With --tls-client-ca the "
            "certificate of --tls-cert is the login, whose name is --name. Repeatable.",
        ),
    ):
        with_options = option(with_options)
    return cast("F", with_options)


def _own_tls(options: dict[str, Any]) -> ClientTls | None:
    """Return how to dial other members: with the certificate, and the authorities, that serve our own listeners."""
    authorities, certificate = options.get("tls_client_ca"), options.get("tls_cert")
    if authorities is None or certificate is None:
        return None
    try:
        return ClientTls(authorities, certificate=certificate, key=options.get("tls_key"))
    except AmqpError as error:
        raise click.UsageError(error.description) from None


def rule_of(text: str) -> MeshRule:
    """Return the rule in the value of ``--mesh-rule``."""
    from ..mesh import MeshRule

    known = [each for each in MeshRule.__struct_fields__ if each != "address"]
    address, _, query = text.partition("?")
    given: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for name in given:
        if name not in known:
            meant = suggestion(name, known)
            raise click.BadParameter(
                f"{text!r}: there is no option {name!r}{meant or ', only ' + ', '.join(known)}",
                param_hint="--mesh-rule",
            )
    if "nodes" in given:
        given["nodes"] = [each for each in given["nodes"].split(",") if each]
    try:
        return msgspec.convert({"address": address, **given}, MeshRule, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--mesh-rule") from None
