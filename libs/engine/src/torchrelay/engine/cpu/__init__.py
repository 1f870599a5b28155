"""A layer's steps as compiled kernels, for CPUs with AVX-512."""
