"""Events as lines: aligned for people, JSON for scripts."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from rich.text import Text

from torchrelay.cli.views.console import printable, shorten_ids, shorten_name
from torchrelay.common.quantities import format_bytes, format_duration

_KIND_CELLS = 17  # the longest are instance.released and instance.draining
_TEXT_INDENT = 4  # of a text below its event
_LEAST_MODEL_CELLS, _MOST_MODEL_CELLS = 12, 32
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"(\d+)([smhd])")
Event = Mapping[str, Any]  # as the gateway returns it: fields of its kind beside those of all
_STYLES = {"failed": "red", "lost": "red", "stopped": "magenta", "repaired": "yellow", "slow": "yellow"}


def parse_duration(text: str) -> timedelta:
    """``30s``, ``10m``, ``2h``, ``7d``. Raises ``ValueError``."""
    matched = _AGO.fullmatch(text)
    if matched is None:
        raise ValueError(f"{text!r} is not a duration: write 30s, 10m, 2h or 7d")
    return timedelta(seconds=int(matched[1]) * _UNITS_S[matched[2]])


class EventLines:
    """Aligned lines of a stream: the model column grows with the names seen so far."""

    def __init__(self) -> None:
        self._model_cells = _LEAST_MODEL_CELLS

    def line(self, event: Event, now: datetime, width: int | None = None) -> Text:
        """``now``: events of another day carry their date. A text that does not fit into ``width`` follows on lines of
        its own, broken between words.
        """
        at = datetime.fromtimestamp(event["at_unix_us"] / 1e6)
        when = at.strftime("%H:%M:%S.%f" if at.date() == now.date() else "%Y-%m-%d %H:%M:%S.%f")[:-3]
        head_cells = len(when) + _KIND_CELLS + 4
        model = printable(event["model"])
        model = model if width is None else shorten_name(model, max(width - head_cells, _LEAST_MODEL_CELLS))
        self._model_cells = min(max(self._model_cells, len(model)), _MOST_MODEL_CELLS)
        kind = event["kind"]
        style = _STYLES.get(kind.partition(".")[2], "")
        named = f"{model:<{self._model_cells}}"
        text = shorten_ids(event_text(event))
        if width is not None and head_cells + len(named) + 2 + len(text) > width:
            named, indent = named.rstrip(), " " * _TEXT_INDENT
            lines = textwrap.wrap(
                text,
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            text = "".join(f"\n{line}" for line in lines)
            return Text.assemble((when, "dim"), "  ", (f"{kind:<{_KIND_CELLS}}", style), "  ", (named, "bold"), text)
        return Text.assemble((when, "dim"), "  ", (f"{kind:<{_KIND_CELLS}}", style), "  ", (named, "bold"), "  ", text)


def event_text(event: Event) -> str:
    """A line for people: the reason, preceded by the worker where the reason does not name it."""
    kind, reason = event["kind"], event["reason"]
    if kind.startswith("model."):
        version_id, size = str(event.get("version_id", "")), event.get("pack_bytes")
        return f"version {version_id[:12]}, {format_bytes(size)}" if version_id and size else ""
    worker = str(event.get("worker_id", "")) if kind.startswith(("instance.", "scale.")) else ""
    if worker and kind.startswith(("instance.", "scale.set_roles")):
        worker += f" ({event.get('roles', '')})"
        if event.get("in_state_s") and kind != "instance.ready":  # its reason says how long
            worker += f" after {format_duration(float(event['in_state_s']))}"
    text = f"{worker}: {reason}" if worker and reason else worker or reason
    return printable(text).replace("\n", " ")


def json_line(event: Event) -> str:
    """A JSON object on a single line: the fields, and as ``text`` the line for people instead of the reason."""
    return json.dumps({name: value for name, value in event.items() if name != "reason"} | {"text": event_text(event)})
