"""Who computes next and who owns which pages. No torch, no clock, no randomness: a simulation runs it."""
