"""A real trained model, SmolLM2-135M-Instruct, from PyPI to the platform."""
