"""The bounded use of a resource of the gateway, in total and per tenant. Pure.

A tenant is refused beyond its own share (429), whatever others use. Beyond the total, every tenant is refused (503).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchrelay.common.errors import AtCapacity, Overloaded


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """``noun``: what is counted, as errors call it. The settings are named in errors, too."""

    noun: str
    total: int
    total_setting: str
    per_tenant: int
    per_tenant_setting: str


class Shares:
    """The amounts of a resource that tenants hold."""

    def __init__(self, limits: ShareLimits) -> None:
        self._limits = limits
        self._held: dict[str, int] = {}  # by tenant; never 0
        self.num_held = 0

    def held_by(self, tenant_id: str) -> int:
        return self._held.get(tenant_id, 0)

    def take(self, tenant_id: str, amount: int = 1) -> None:
        """Raises ``Overloaded`` beyond the tenant's share and ``AtCapacity`` beyond the total; takes nothing then."""
        limits, held = self._limits, self.held_by(tenant_id)
        if held + amount > limits.per_tenant:
            raise Overloaded(
                f"your tenant has {held:,} {limits.noun} at this gateway, and its share is {limits.per_tenant:,} "
                f"(setting {limits.per_tenant_setting}); try again when some have ended"
            )
        if self.num_held + amount > limits.total:
            raise AtCapacity(
                f"this gateway has {self.num_held:,} {limits.noun}, and its limit is {limits.total:,} "
                f"(setting {limits.total_setting}); try again"
            )
        self._held[tenant_id] = held + amount
        self.num_held += amount

    def give_back(self, tenant_id: str, amount: int = 1) -> None:
        left = self._held[tenant_id] - amount
        assert left >= 0, "no more is given back than was taken"
        self.num_held -= amount
        if left:
            self._held[tenant_id] = left
        else:
            del self._held[tenant_id]

    @contextmanager
    def held(self, tenant_id: str) -> Iterator[None]:
        """Takes a unit of the resource for the block. Raises as ``take`` does."""
        with self.account(tenant_id) as account:
            account.take(1)
            yield

    @contextmanager
    def account(self, tenant_id: str) -> Iterator[ShareAccount]:
        """A growing amount, given back by ``release`` or at the end of the block."""
        account = ShareAccount(self, tenant_id)
        try:
            yield account
        finally:
            account.release()


class ShareAccount:
    """The units of a resource that a request holds."""

    def __init__(self, shares: Shares, tenant_id: str) -> None:
        self._shares = shares
        self._tenant_id = tenant_id
        self.amount = 0

    def take(self, amount: int) -> None:
        """Raises as ``Shares.take`` does."""
        if amount:
            self._shares.take(self._tenant_id, amount)
            self.amount += amount

    def release(self, kept: int = 0) -> None:
        """Gives back everything above ``kept``; idempotent."""
        if self.amount > kept:
            self._shares.give_back(self._tenant_id, self.amount - kept)
            self.amount = kept
