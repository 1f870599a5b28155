"""Tenants and models whose jobs recently ended text processes. Pure: the time is an argument."""

from __future__ import annotations

CONFINED_S = 60.0
MAX_MODELS = 3


class Suspects:
    """(Tenant, model) pairs that are confined for a minute; with several of them, the tenant with all its models."""

    def __init__(self) -> None:
        self._until_s: dict[str, dict[str, float]] = {}  # by tenant and model

    def note(self, tenant: str, model: str, now_s: float) -> None:
        """Notes that a job of this pair ended its process."""
        for name in list(self._until_s):
            self._prune(name, now_s)
        models = self._until_s.setdefault(tenant, {})
        # The first models are enough to confine the tenant, which may have any number of models.
        if model in models or len(models) < MAX_MODELS:
            models[model] = now_s + CONFINED_S

    def is_suspect(self, tenant: str, model: str, now_s: float) -> bool:
        if tenant not in self._until_s:
            return False
        self._prune(tenant, now_s)
        models = self._until_s.get(tenant, {})
        return model in models or len(models) >= MAX_MODELS

    def _prune(self, tenant: str, now_s: float) -> None:
        models = {model: until_s for model, until_s in self._until_s[tenant].items() if until_s > now_s}
        if models:
            self._until_s[tenant] = models
        else:
            del self._until_s[tenant]
