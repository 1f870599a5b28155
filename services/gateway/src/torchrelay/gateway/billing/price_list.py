"""The cost of tokens, and the row of the price list that applies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.gateway.core import Price


def cost_nano(price: Price, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """The cost of tokens in integer nano-dollars; cached prompt tokens have their own price."""
    num_fresh = num_prompt_tokens - num_cached_tokens
    return num_fresh * price.prompt_nano + num_cached_tokens * price.cached_nano + num_output_tokens * price.output_nano


def price_at(price_list: Sequence[Price], model: str, at_unix_us: int) -> Price:
    """The row of ``model`` valid at that time, or else the default. ``price_list`` is sorted by ``valid_from_unix_us``.

    The schema has a default row valid from time 0; without it this raises ``LookupError``.
    """
    chosen: Price | None = None
    for price in price_list:
        if price.valid_from_unix_us > at_unix_us:
            break
        if price.model == model or (price.model == "" and (chosen is None or chosen.model == "")):
            chosen = price
    if chosen is None:
        raise LookupError("the price list has no valid default")
    return chosen


def valid_until(price_list: Sequence[Price], price: Price) -> int | None:
    """The start of the model's next row; ``None`` if there is none."""
    later = (p.valid_from_unix_us for p in price_list if p.model == price.model)
    return min((begin for begin in later if begin > price.valid_from_unix_us), default=None)
