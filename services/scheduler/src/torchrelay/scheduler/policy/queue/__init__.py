"""Waiting requests, and the gateways that they belong to."""
