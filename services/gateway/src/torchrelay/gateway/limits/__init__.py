"""Limits of keys and tenants, shared by all gateways through Redis; tenants' shares of this gateway."""
