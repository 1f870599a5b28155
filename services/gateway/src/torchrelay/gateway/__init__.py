"""The tenants' door of Torchrelay: REST, gRPC, keys, catalogue, ledger."""
