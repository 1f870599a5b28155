"""A pack's bytes as tensors: arrival, copy to a device, reordered copies."""
