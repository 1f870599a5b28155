"""A tiny chat model that explains Torchrelay's terms."""
