"""Hugging Face configs, checked; the supported architectures; the order and shapes of a model's tensors."""
