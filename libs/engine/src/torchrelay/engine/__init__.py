"""The torch engine: one model in one slot, prompts in, tokens out. ``instance`` is the door; see the README."""
