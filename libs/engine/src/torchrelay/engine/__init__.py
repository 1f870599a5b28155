"""The torch engine: one model in one slot, prompts in, tokens out. ``instance`` is the entry point; see the README."""
