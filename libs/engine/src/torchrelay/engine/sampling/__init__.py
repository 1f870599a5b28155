"""From logits to tokens. May import batching (sequences), core."""
