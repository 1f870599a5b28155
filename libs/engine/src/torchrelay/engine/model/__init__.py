"""The one decoder of all architectures, and a batch as its tensors. May import weights, kernels, batching (plans),
modelspec.
"""
