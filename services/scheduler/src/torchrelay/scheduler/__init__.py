"""Dispatch, autoscaling and relay planning of Torchrelay."""
