"""rate and budget limits in Redis. Imports core, sql, billing (cost, dollars)."""
