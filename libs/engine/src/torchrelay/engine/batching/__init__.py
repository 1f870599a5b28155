"""Batch scheduling and page ownership. No torch, no clock, no randomness."""
