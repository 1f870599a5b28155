"""The cost of tokens, and the row of the price list that applies. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from torchrelay.gateway.core import Price


def cost_nano(price: Price, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """The cost of tokens in integer nano-dollars; cached prompt tokens have their own price."""
    num_fresh = num_prompt_tokens - num_cached_tokens
    return num_fresh * price.prompt_nano + num_cached_tokens * price.cached_nano + num_output_tokens * price.output_nano


class PriceList:
    """All rows of the price list."""

    def __init__(self, rows: Sequence[Price]) -> None:
        """``rows``: sorted by ``valid_from_unix_us``."""
        self.rows = rows
        self._of_model = defaultdict[str, list[Price]](list)  # "": the default
        for row in rows:
            self._of_model[row.model].append(row)

    def at(self, model: str, at_unix_us: int) -> Price:
        """The row of ``model`` valid at that time, or else the default.

        The schema has a default row valid from time 0; without it this raises ``LookupError``.
        """
        for name in (model, ""):
            rows = self._of_model.get(name, ())
            if place := bisect_right(rows, at_unix_us, key=lambda row: row.valid_from_unix_us):
                return rows[place - 1]
        raise LookupError("the price list has no valid default")

    def valid_until(self, price: Price) -> int | None:
        """The start of the model's next row; ``None`` if there is none."""
        rows = self._of_model[price.model]
        place = bisect_right(rows, price.valid_from_unix_us, key=lambda row: row.valid_from_unix_us)
        return rows[place].valid_from_unix_us if place < len(rows) else None
