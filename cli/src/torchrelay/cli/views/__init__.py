"""Tables and lines for the terminal; only ``console`` does I/O."""
