"""Instruments: admission, relay, replication."""
