"""Authentication: tenants and their API keys, operators and their roles, OIDC tokens."""
