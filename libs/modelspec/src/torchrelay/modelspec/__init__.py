"""Hugging Face configs -> checked ModelConfig, the supported architectures, and the order and shapes of a model's
tensors. Standard library only; imports nothing of the platform.
"""
