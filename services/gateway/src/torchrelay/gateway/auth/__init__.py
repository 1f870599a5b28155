"""tenants, API keys, key format: who calls. Imports core, sql."""
