"""Vectors of texts, at ``/v1/embeddings``."""
