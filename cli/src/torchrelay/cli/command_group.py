"""The root of all commands: a wrong option, or an argument left out, is told in a plain sentence."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Typer names the option, and lets Pydantic say what is wrong with its value; here that is put in our words.

    Of an argument left out it says the name; here its help is added: what it is, and where to find it.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if faults := getattr(error.__cause__, "errors", None):  # a ValidationError, without importing Pydantic
                from torchrelay.common.validation import describe_error

                error.message = describe_error("", faults()[0])
            elif not error.message:  # one that is missing
                error.message = getattr(error.param, "help", None) or ""
            raise
