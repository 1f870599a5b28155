"""Prices, ledger, bills, usage registers and reports, reconciliation, heartbeat and orphan sweep."""
