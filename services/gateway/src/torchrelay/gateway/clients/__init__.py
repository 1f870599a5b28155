"""Calls to the scheduler and the param-store, and how errors name these."""
