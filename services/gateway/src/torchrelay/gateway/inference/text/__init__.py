"""Text in and out: chat templates and their process, tokenizers, prompt encoding, detokenization."""
