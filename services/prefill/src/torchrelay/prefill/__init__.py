"""The prefill role of a Torchrelay worker: prompt in, first token and KV out."""
