"""Who calls: tenants, API keys and their format."""
