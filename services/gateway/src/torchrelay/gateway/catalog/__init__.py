"""Published models and versions, uploads, and garbage collection."""
