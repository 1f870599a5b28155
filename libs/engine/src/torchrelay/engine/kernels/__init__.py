"""Tensor operations, and the choice of their implementation for a device."""
