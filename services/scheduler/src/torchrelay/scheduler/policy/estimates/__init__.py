"""Estimates learned from measurements: times, answer lengths, cached prefixes."""
