"""Vectors of texts, at ``/v1/embeddings``, and scores of pairs of texts, at ``/v1/rerank``."""
