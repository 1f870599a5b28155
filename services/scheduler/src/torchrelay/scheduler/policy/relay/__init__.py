"""Transfers from plan to end, their links, and when to re-plan them."""
