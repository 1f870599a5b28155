"""Rate and budget limits, shared by all gateways through Redis; tenants' shares of this gateway."""
