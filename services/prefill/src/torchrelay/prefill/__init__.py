"""The prefill role of a Torchrelay worker: a prompt in, its first token and KV out."""
