"""Prices, ledger, invoices, exports, usage registers and reports, reconciliation, heartbeat and orphan sweep."""
