"""The cost of tokens, and the row of the price list that applies. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from torchrelay.gateway.core import Price, PriceService


def cost_nano(price: Price, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """The cost of tokens in integer nano-dollars; cached prompt tokens have their own price."""
    num_fresh = num_prompt_tokens - num_cached_tokens
    return num_fresh * price.prompt_nano + num_cached_tokens * price.cached_nano + num_output_tokens * price.output_nano


class PriceList:
    """All rows of the price list."""

    def __init__(self, rows: Sequence[Price]) -> None:
        """``rows``: sorted by ``valid_from_unix_us``."""
        self.rows = rows
        self._of = defaultdict[tuple[PriceService, str], list[Price]](list)  # by service and model; "": the default
        for row in rows:
            self._of[row.service, row.model].append(row)

    def at(self, model: str, at_unix_us: int, service: PriceService = "") -> Price:
        """The row of ``model`` valid at that time, or else the default. Where ``service`` has neither, the row that
        requests as they come have.

        The schema has a default row valid from time 0; without it this raises ``LookupError``.
        """
        for key in ((service, model), (service, ""), ("", model), ("", "")):
            rows = self._of.get(key, ())
            if place := bisect_right(rows, at_unix_us, key=lambda row: row.valid_from_unix_us):
                return rows[place - 1]
        raise LookupError("the price list has no valid default")

    def valid_until(self, price: Price) -> int | None:
        """The start of the next row of its model and service; ``None`` if there is none."""
        rows = self._of[price.service, price.model]
        place = bisect_right(rows, price.valid_from_unix_us, key=lambda row: row.valid_from_unix_us)
        return rows[place].valid_from_unix_us if place < len(rows) else None
