"""The torch engine of Torchrelay: layer-wise models, paged KV, batching, sampling."""
