"""gRPC of the tenants: the server, its calls and their messages."""
