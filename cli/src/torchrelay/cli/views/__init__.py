"""What is drawn on the terminal; only ``console`` does I/O."""
