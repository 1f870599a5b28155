"""One input to changed state and effects; the only code that sees several packages at once."""
