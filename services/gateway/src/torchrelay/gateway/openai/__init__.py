"""OpenAI's HTTP API: request bodies, replies and events, errors, and the ASGI app of the token path."""
