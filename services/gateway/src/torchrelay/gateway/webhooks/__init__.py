"""Webhooks: events of usage, budgets and invoices, sent to addresses that operators name."""
