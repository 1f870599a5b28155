"""The root command group: explains a wrong option or a missing argument in one sentence."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


def has_subcommand(context: typer.Context) -> bool:
    """Whether a group that is a command itself was called for one of its subcommands. Raises ``BadParameter`` if
    options stand before that.
    """
    if context.invoked_subcommand is None:
        return False
    sources = [context.get_parameter_source(name) for name in context.params]
    if any(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise typer.BadParameter(f"options go after {context.invoked_subcommand!r}, not before it")
    return True


class CommandGroup(TyperGroup):
    """Rephrases Pydantic's message about an option's value, and adds its help to the name of a missing argument."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if faults := getattr(error.__cause__, "errors", None):  # a ValidationError, without importing Pydantic
                from torchrelay.common.validation import describe_error

                error.message = describe_error("", faults()[0])
            elif not error.message:  # a missing argument
                error.message = getattr(error.param, "help", None) or ""
            raise
