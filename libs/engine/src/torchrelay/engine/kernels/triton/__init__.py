"""Triton kernels of a GPU. As kernels.cpu."""
