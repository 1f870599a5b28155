"""Discrete-event simulation of a cluster around the scheduler's own policy, without clock or randomness of its own."""
