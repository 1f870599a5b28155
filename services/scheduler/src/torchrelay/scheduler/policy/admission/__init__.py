"""Requests that wait, and the gateways that they belong to."""
