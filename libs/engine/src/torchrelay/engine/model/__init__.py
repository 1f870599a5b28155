"""The decoder of all architectures, and the tensors of a batch."""
