"""prices, ledger, ledger rows, bills, usage registers and queries, reconciliation, heartbeat and orphan sweep. Imports
core, sql.
"""
