"""The root command group: explains a wrong option or a missing argument in one sentence."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


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
