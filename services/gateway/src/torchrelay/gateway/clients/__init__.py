"""Calls to the scheduler and the param-store, and their names in errors."""
