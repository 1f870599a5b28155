"""Predictions of durations: a linear model and its fit to what was measured."""
