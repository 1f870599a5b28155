"""OpenAI's HTTP API: request bodies, replies and events, embeddings."""
