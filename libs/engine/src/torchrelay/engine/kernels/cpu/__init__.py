"""A layer's steps as compiled kernels, for CPUs with AVX2 or AVX-512."""
