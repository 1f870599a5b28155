"""The token path: prompts into token ids, requests to workers and back, tokens into text, over REST and gRPC."""
