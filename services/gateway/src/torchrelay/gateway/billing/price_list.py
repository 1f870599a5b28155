"""What tokens cost, and which row of the price list applies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.gateway.core import Price


def cost_nano(price: Price, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """What tokens cost: cached prompt tokens at their own price, integers throughout."""
    num_fresh = num_prompt_tokens - num_cached_tokens
    return num_fresh * price.prompt_nano + num_cached_tokens * price.cached_nano + num_output_tokens * price.output_nano


def price_at(price_list: Sequence[Price], model: str, at_unix_us: int) -> Price:
    """The row of ``model`` valid at that time, else the default's. ``price_list`` is sorted by ``valid_from_unix_us``.

    A default row valid from time 0 is part of the schema; without it this raises ``LookupError``.
    """
    chosen: Price | None = None
    for price in price_list:
        if price.valid_from_unix_us > at_unix_us:
            break
        if price.model == model or (price.model == "" and (chosen is None or chosen.model == "")):
            chosen = price
    if chosen is None:
        raise LookupError("the price list has no default that is valid now")
    return chosen


def valid_until(price_list: Sequence[Price], price: Price) -> int | None:
    """When the next row of the same model begins; ``None`` while there is none."""
    later = (p.valid_from_unix_us for p in price_list if p.model == price.model)
    return min((begin for begin in later if begin > price.valid_from_unix_us), default=None)
