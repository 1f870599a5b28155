"""Tensor operations and the choice of their backend for a device (attention, linear, fused ops, whole layers). May
import profile, core, modelspec; never batching, model, weights, kv.
"""
