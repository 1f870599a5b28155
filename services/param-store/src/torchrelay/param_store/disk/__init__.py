"""The disk tier: cached packs, their writer, and a remote store that reads through them."""
