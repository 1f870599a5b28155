"""Advice on settings: a day is simulated again with changes, and what each would save."""
