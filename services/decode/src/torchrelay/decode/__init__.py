"""The decode role of a Torchrelay worker: KV in, all tokens but the first out."""
