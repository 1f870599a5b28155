"""Slots that models yield to others: when, which, and with which reason."""
