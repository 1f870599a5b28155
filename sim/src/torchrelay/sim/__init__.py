"""Discrete-event simulation of a cluster, around the scheduler's own policy. No clock, no randomness of its own."""
