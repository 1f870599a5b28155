"""GGUF files, read as untrusted input and converted to Hugging Face folders in bf16."""
