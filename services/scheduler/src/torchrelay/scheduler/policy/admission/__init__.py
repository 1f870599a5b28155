"""Requests that wait and whose they are: queues, gateway_sessions. Imports core."""
