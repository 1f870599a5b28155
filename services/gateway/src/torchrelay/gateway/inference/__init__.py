"""The token path, independent of protocol: prompts to token ids, requests to workers, tokens to text."""
