"""The REST API without the token path, a module per resource."""
