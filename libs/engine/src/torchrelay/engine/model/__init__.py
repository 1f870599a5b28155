"""The decoder of all architectures, the encoder, and the tensors of a batch."""
