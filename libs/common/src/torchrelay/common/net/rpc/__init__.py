"""gRPC set-up of all services: channels with keep-alive, servers with health checks and errors, TLS by setting."""
