"""models and versions, uploads, garbage collection. Imports core, sql, clients, billing.prices, auth.tenants."""
