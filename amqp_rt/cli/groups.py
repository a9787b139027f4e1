"""Groups of commands that are imported when they are used, so that ``--help`` and completion are fast.

For ``amqp-rt`` and for the groups of plug-ins.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..config_files import suggestion
from .environment import check_variables, name_variables, variable_part


@contextmanager
def collections_paused() -> Iterator[None]:
    """Pause the search for cycles of garbage, for imports: it would find none, and take a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class LazyGroup(click.Group):
    """Group whose subclass names its commands, and imports the one that is used.

    Commands that are added to the group as usual come after those.
    """

    def summaries(self) -> dict[str, str]:
        """Return the names of the commands to be imported, in the order of the help: name → short help."""
        return {}

    def load_command(self, name: str) -> click.Command | None:
        """Import the command *name*; None if :meth:`summaries` does not have it.

        Raises:
            click.ClickException: It is not installed.
        """
        raise NotImplementedError

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.summaries(), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.load_command(cmd_name) or super().get_command(ctx, cmd_name)
        if command is not None and ctx.auto_envvar_prefix is not None:
            name_variables(command, f"{ctx.auto_envvar_prefix}_{variable_part(cmd_name)}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            # click would suggest only commands that have been imported.
            meant = suggestion(args[0], self.list_commands(ctx))
            if not meant:
                raise
            raise click.UsageError(f"{error.message.rstrip('.')}{meant}", error.ctx) from None
        if name is not None and command is not None and not ctx.resilient_parsing:
            self._check_variables(ctx, name, command, rest)
        return name, command, rest

    @staticmethod
    def _check_variables(
        ctx: click.Context, name: str, command: click.Command, args: list[str]
    ) -> None:
        """Refuse variables of *command*, which is called with *args*, that belong to no option."""
        # A group of this kind checks the command below it that is called, and imports no others.
        if isinstance(command, LazyGroup) or ctx.auto_envvar_prefix is None:
            return
        # Help shows the right names.
        if set(ctx.help_option_names).isdisjoint(args):
            prefix = f"{ctx.auto_envvar_prefix}_{variable_part(name)}"
            check_variables(command, prefix, f"{ctx.command_path} {name}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = list(self.summaries().items())
        rows += [(name, each.get_short_help_str(80)) for name, each in self.commands.items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
