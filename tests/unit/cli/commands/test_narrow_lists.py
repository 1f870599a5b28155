"""Lists on a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from tests.unit.cli.fake_gateway import MODEL
from torchrelay.cli.commands.key import keys_table
from torchrelay.cli.commands.models import models_table
from torchrelay.cli.commands.uploads import uploads_table
from torchrelay.cli.commands.usage import usage_table

LONG = "birch-company-of-the-north/glossary-with-a-long-name-instruct-2"
TIMES = {"created": 1_790_000_000, "expires": 1_790_086_400}


def test_lists_of_long_names_keep_the_other_columns() -> None:
    """At 80 columns only names are shortened, in their middle."""
    key = {"id": "8x2kq0v3m1c9d7fz", "tenant": LONG.partition("/")[0], "name": "laptop of the office", **TIMES}
    upload = {"id": "upl-0v3m1c9d7fz8x2kq", "model": LONG, "size_bytes": 10**9, **TIMES}
    numbers = {name: 12_345_678 for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")}
    usage = {"data": [{"model": LONG, "cost": "12.000015000", **numbers}], "total": numbers | {"cost": "1.000000000"}}
    for table, whole in (
        (models_table([MODEL | {"id": LONG}]), ("60 (default)", "1.5 MB", "2026-09-2")),
        (keys_table([key], is_small=True), ("8x2kq0v3m1c9d7fz", "no limit", "2026-09-2", "active")),
        (uploads_table([upload], is_small=True), ("upl-0v3m1c9d7fz8x2kq", "1 GB", "2026-09-2")),
        (usage_table(usage, "model"), ("12,345,678", "$12.000015000")),
    ):
        console = Console(width=80, force_terminal=False)
        with console.capture() as captured:
            console.print(table)
        (line,) = [line for line in captured.get().splitlines() if "birch" in line]
        assert all(words in line for words in whole) and "…" in line and len(line) <= 80


def test_an_adapter_is_listed_with_its_base() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(models_table([MODEL | {"id": "acme/tuned", "parent": "acme/base"}]))
    assert "acme/tuned: adapter of acme/base" in captured.get()
