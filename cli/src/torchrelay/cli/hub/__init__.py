"""Models of the Hugging Face hub, read by this machine: their names, and their repositories."""
