"""The name of a model on the hub: ``OWNER/NAME``, with ``:QUANTIZATION`` of a GGUF file and ``@REVISION``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torchrelay.cli.errors import CliError

_NAME = re.compile(r"(hf://)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([\w.-]+))?(?:@([\w./-]*[\w.-]))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """``quantization``: what the name of the GGUF file holds, "" for a model in safetensors. ``revision``: a branch, a
    tag or a commit; None is the default branch.
    """

    repo: str
    quantization: str
    revision: str | None


def hub_name(source: str, revision: str | None) -> HubName | None:
    """The model that ``source`` names on the hub, None if it is a path: what exists here is a path, unless ``hf://``
    precedes it or a ``revision`` is given; what begins with ".", "/" or "~" or ends with "/" is always a path.

    Raises ``CliError``, also for what does not exist in a folder that does: it is as likely a mistyped path as a name.
    """
    match = _NAME.fullmatch(source)
    if revision is None and (match is None or match[1] is None):
        if match is None or Path(source).exists():
            return None
        owner = source.partition("/")[0]
        if Path(owner).is_dir():
            hint = f"give a path that exists, or hf://{source} for the model of the hub"
            raise CliError(f"{source} does not exist, and {owner} is a folder here", hint)
    if match is None:
        raise CliError(f"{source} is not a name on the hub", "--revision is for OWNER/NAME or OWNER/NAME:QUANTIZATION")
    if revision is not None and match[4] is not None:
        raise CliError(f"{source} has a revision already", "leave --revision out")
    return HubName(match[2], match[3] or "", revision or match[4])
