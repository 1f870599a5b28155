"""Torchrelay: serve many models, hold accelerators only while they are called."""
