"""vLLM as the engine of a slot: it loads from the host's arena while a pack arrives, and serves both roles."""
