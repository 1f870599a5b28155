"""The decode role of a Torchrelay worker: KV in, the other tokens out."""
