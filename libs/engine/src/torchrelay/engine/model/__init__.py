"""The one decoder of all architectures, and a batch as its tensors."""
