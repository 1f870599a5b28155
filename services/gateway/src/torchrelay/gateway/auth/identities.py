"""Callers by their ``Authorization`` header: a tenant's key, an operator's key, or the owner of an OIDC token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.gateway.auth.api_keys import ApiKeys, bearer_token
from torchrelay.gateway.auth.key_format import OPERATOR
from torchrelay.gateway.auth.operators import Operators
from torchrelay.gateway.core import Principal

if TYPE_CHECKING:
    from torchrelay.gateway.auth.oidc import OidcTokens


class Identities:
    """Authenticates every caller."""

    def __init__(self, keys: ApiKeys, operators: Operators, tokens: OidcTokens | None) -> None:
        """``tokens``: None if no issuer is configured."""
        self._keys = keys
        self._operators = operators
        self._tokens = tokens

    async def authenticate(self, authorization: str | None) -> Principal:
        """The principal of the header. Raises ``Unauthenticated``, ``PermissionDenied`` or ``Unavailable``."""
        token = bearer_token(authorization or "")
        if token.startswith(f"{OPERATOR}-"):
            return await self._operators.authenticate(token)
        if self._tokens is not None and token.count(".") == 2:
            return await self._tokens.authenticate(token)
        return await self._keys.authenticate(authorization)
