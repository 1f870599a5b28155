"""OpenAI's Responses API on the token path."""
