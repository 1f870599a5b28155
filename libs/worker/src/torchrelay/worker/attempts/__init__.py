"""Running attempts, the outboxes of their gateways, stop strings and usage registers."""
