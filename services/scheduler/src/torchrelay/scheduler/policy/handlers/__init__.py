"""Apply an input: change the state and return effects. The only code that sees several packages at once."""
