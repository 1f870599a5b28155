"""The worker process of Torchrelay: one slot, one engine, the roles it plays."""
