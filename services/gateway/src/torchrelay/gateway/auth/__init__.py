"""Authentication: tenants, API keys and their format."""
