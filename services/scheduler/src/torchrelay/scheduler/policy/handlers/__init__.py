"""Handlers of inputs, which change the state and add effects."""
