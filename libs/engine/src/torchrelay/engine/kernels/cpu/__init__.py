"""Kernels in C for CPUs with AVX2 or AVX-512, and their number of threads."""
