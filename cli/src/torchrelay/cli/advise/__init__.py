"""Advice to the operator: the day that the platform recorded, its simulations, and the report."""
