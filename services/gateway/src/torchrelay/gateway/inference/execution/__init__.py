"""one request from admission to settlement: admission stream, worker streams, attempt, generation, running request,
notifier, ledger writer. Imports core, inference.core, inference.ports, clients.
"""
