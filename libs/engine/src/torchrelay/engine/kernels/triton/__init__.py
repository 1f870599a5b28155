"""Triton kernels for GPUs."""
