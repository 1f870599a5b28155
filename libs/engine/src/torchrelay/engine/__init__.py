"""The torch engine of Torchrelay: layer-wise models, paged KV, batching, sampling.

``core`` and ``handover`` are light (no torch); ``instance`` is the door to everything else.
"""
